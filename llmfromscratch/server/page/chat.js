// The conversation. Whatever the model says is text: it is put into text nodes, never parsed as HTML.

import { ask, events, key, Refusal, sentenceOf } from "./server.js";

const $ = (id) => document.getElementById(id);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

let messages = []; // of the turns that count: {role, content}
let running = null; // the AbortController of the answer under way
let atEnd = true; // whether the reader looks at the end of the conversation
let model = ""; // its name, as the server calls it; "" as long as the server has not said

export function startChat() {
  restoreSettings();
  learnModel();
  watchTheEnd();
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send($("question").value);
  });
  $("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send($("question").value);
    }
  });
  $("question").addEventListener("input", grow);
  document.addEventListener("keydown", (event) => event.key === "Escape" && stop());
  $("stop").addEventListener("click", stop);
  $("clear").addEventListener("click", clear);
  for (const example of document.querySelectorAll(".examples button")) {
    example.addEventListener("click", () => send(example.textContent));
  }
}

/** Asks for the model's name; also called when the server is back, which may then have another model. */
export async function learnModel() {
  try {
    const list = await (await ask("v1/models")).json();
    model = list.data[0].id;
    $("model").textContent = model;
  } catch {
    model = ""; // asked again with the next question, which also says what is wrong
  }
}

// ---- settings

const SETTINGS = ["system", "max-tokens", "temperature", "seed"];

function restoreSettings() {
  for (const name of SETTINGS) {
    const kept = sessionStorage.getItem(`llmfromscratch-${name}`);
    if (kept !== null) $(name).value = kept;
    $(name).addEventListener("input", () => {
      sessionStorage.setItem(`llmfromscratch-${name}`, $(name).value);
      summarize();
    });
  }
  $("key").value = key.get();
  $("key").addEventListener("input", () => key.set($("key").value.trim()));
  $("key").addEventListener("change", learnModel);
  summarize();
}

function summarize() {
  const parts = [`${$("max-tokens").value || "?"} tokens at most`, `temperature ${$("temperature").value || "?"}`];
  if ($("seed").value) parts.push(`seed ${$("seed").value}`);
  if ($("system").value.trim()) parts.push("own system prompt");
  $("summary").textContent = parts.join(", ");
}

/** Whether the settings can be meant; if not, the first that cannot is shown and says why. */
function settingsAreFine() {
  const wrong = SETTINGS.map($).find((field) => !field.checkValidity());
  if (!wrong) return true;
  $("settings").open = true;
  wrong.reportValidity();
  return false;
}

function request(question) {
  const system = $("system").value.trim();
  const body = {
    model,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: question }],
    max_tokens: Number($("max-tokens").value),
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("seed").value !== "") body.seed = Number($("seed").value);
  return body;
}

// ---- asking

async function send(text) {
  const question = text.trim();
  if (!question || running || !settingsAreFine()) return;
  running = new AbortController();
  $("question").value = "";
  grow();
  const turn = addTurn(question);
  const history = messages; // a new conversation may begin meanwhile, which this turn is no part of
  busy(true);
  const answer = { text: "", tokens: null, began: performance.now(), first: null, reason: null };
  let counts = true;
  try {
    if (!model) await learnModel();
    await receive(request(question), answer, turn);
    turn.note(ending(answer), `Answer complete. ${ending(answer)}`);
  } catch (error) {
    counts = running.signal.aborted;
    if (counts) turn.note("Stopped.", "Stopped.");
    else turn.fail(error instanceof Refusal ? error.message : `The page failed: ${error.message}.`, question);
  }
  // a turn without an answer is left out: two questions in a row are no conversation that models know
  if (counts && answer.text) {
    history.push({ role: "user", content: question }, { role: "assistant", content: answer.text });
  }
  turn.done();
  running = null;
  busy(false);
}

async function receive(body, answer, turn) {
  const response = await ask("v1/chat/completions", { body, signal: running.signal });
  for await (const event of events(response)) {
    if (event.error) throw new Refusal(sentenceOf(event) || "The engine gave the answer up and gave no reason.");
    if (event.usage) answer.tokens = event.usage.completion_tokens;
    const choice = event.choices?.[0];
    if (choice?.finish_reason) answer.reason = choice.finish_reason;
    const piece = choice?.delta?.content;
    if (!piece) continue;
    answer.first ??= performance.now();
    answer.text += piece;
    turn.add(piece);
  }
}

/** How the answer ended and what it took, in a line. */
function ending(answer) {
  const parts = [];
  if (answer.reason === "length") parts.push("Cut off: the tokens allowed are used up (Settings, max tokens)");
  if (answer.tokens !== null) parts.push(plural(answer.tokens, "token"));
  if (answer.first !== null) {
    parts.push(`first after ${((answer.first - answer.began) / 1000).toFixed(2)} s`);
    const seconds = (performance.now() - answer.first) / 1000;
    if (answer.tokens > 1 && seconds > 0) parts.push(`${((answer.tokens - 1) / seconds).toFixed(0)} tokens per second`);
  }
  if (!answer.text) parts.unshift("The model said nothing");
  return parts.join(" · ");
}

function stop() {
  running?.abort();
}

function clear() {
  stop();
  messages = [];
  $("log").replaceChildren();
  $("welcome").hidden = false;
  $("clear").hidden = true;
  $("question").focus();
}

// ---- drawing

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** A question and the place for its answer. */
function addTurn(question) {
  $("welcome").hidden = true;
  $("clear").hidden = false;
  const asked = element("li", "message user", "");
  asked.append(element("span", "hidden", "You: "), element("p", "words", question));
  const answered = element("li", "message model", "");
  const words = element("p", "words waiting", "");
  // a screen reader waits until the answer is whole instead of reading out every token
  answered.setAttribute("aria-busy", "true");
  answered.append(element("span", "hidden", "Model: "), words);
  $("log").append(asked, answered);
  atEnd = true;
  follow();
  return {
    add(piece) {
      atEnd = isAtEnd(); // asked now: the event of a scroll comes a frame late, and tokens may come faster
      words.append(piece);
      follow();
    },
    note(text, spoken) {
      answered.append(element("p", "note quiet", text));
      $("status").textContent = spoken;
    },
    fail(sentence, again) {
      const note = element("p", "note failed", sentence);
      note.setAttribute("role", "alert");
      const button = element("button", "link", "Ask again");
      button.type = "button";
      button.addEventListener("click", () => {
        if (running) return;
        asked.remove();
        answered.remove();
        send(again);
      });
      answered.append(note, button);
    },
    done() {
      words.classList.remove("waiting");
      if (!words.textContent) words.remove();
      answered.setAttribute("aria-busy", "false");
      follow();
    },
  };
}

/** Keeps the end in view, unless the reader has scrolled up: then they are left where they are. */
function follow() {
  if (atEnd) $("scroll").scrollTop = $("scroll").scrollHeight;
}

function isAtEnd() {
  const box = $("scroll");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
}

function watchTheEnd() {
  $("scroll").addEventListener("scroll", () => (atEnd = isAtEnd()));
  new ResizeObserver(follow).observe($("scroll")); // the settings or a longer question take room from it
}

function busy(is) {
  const held = document.activeElement === $("send") || document.activeElement === $("stop");
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (is) $("status").textContent = "The model is answering.";
  if (held) $(is ? "stop" : "question").focus();
}

/** The field grows with its text, up to what the style allows. */
function grow() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}
