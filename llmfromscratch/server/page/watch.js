// The engine as it works: asks /watch twice a second while the page is in view, and draws what it says.

import { ask, Refusal } from "./server.js";

const EVERY = 500, WHEN_AWAY = 2000, PATIENCE = 8000; // milliseconds
const CELLS = 200; // squares in the grid, at most
const GLYPHS = { waiting: "○", prefilling: "◐", decoding: "●", preempted: "↺", finished: "✓", aborted: "✕" };

const $ = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en");
const rows = new Map(); // request id -> its <li>

/** onBack: called when the server answers after it has not. */
export function startWatching(onBack) {
  let timer = 0, away = false, asking = false;
  async function look() {
    if (asking || document.hidden) return;
    asking = true;
    try {
      draw(await (await ask("watch", { signal: AbortSignal.timeout(PATIENCE) })).json());
      if (away) onBack();
      away = false;
    } catch (error) {
      const hung = `The server has not answered for ${PATIENCE / 1000} seconds.`;
      say(error instanceof Refusal ? error.message : error.name === "TimeoutError" ? hung : `The page failed: ${error.message}.`);
      away = true;
    }
    asking = false;
    timer = setTimeout(look, away ? WHEN_AWAY : EVERY);
  }
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    look();
  });
  look();
}

/** What keeps the picture from being true; the old one stays, faded. */
function say(sentence) {
  const text = `${sentence} The picture below is old; it is asked for again every ${WHEN_AWAY / 1000} seconds.`;
  if ($("away").textContent !== text) $("away").textContent = text;
  $("away").hidden = false;
  $("engine").classList.add("old");
  $("glance").textContent = "engine out of reach";
}

function draw(engine) {
  $("away").hidden = true;
  $("away").textContent = "";
  $("engine").classList.remove("old");
  drawSpeed(engine.tokens_per_second);
  drawRequests(engine);
  drawBlocks(engine.blocks);
  drawTotals(engine.totals);
  const speed = engine.tokens_per_second.at(-1) ?? 0;
  $("glance").textContent = `${engine.running} running, ${engine.waiting} waiting, ${number(speed)} tok/s`;
}

const number = (value) => (value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1));

// ---- tokens per second

function drawSpeed(rates) {
  const now = rates.at(-1) ?? 0, most = Math.max(0, ...rates), top = roundUp(most);
  const places = rates.map((rate, i) => `${60 - rates.length + i + 1},${(39 - (rate / top) * 36).toFixed(2)}`);
  const line = places.length > 1 ? `M${places.join("L")}` : "";
  $("curve").setAttribute("d", line);
  $("area").setAttribute("d", line && `${line}V40H${60 - rates.length + 1}Z`);
  $("line").setAttribute("aria-label", `Now ${number(now)} tokens per second, at most ${number(most)} in the last minute`);
  $("top").textContent = most ? number(top) : "";
  $("speed").textContent = number(now);
}

/** The next of 1, 2, 5, 10, 20, 50, … */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}

// ---- requests

function drawRequests({ requests, running, waiting, unlisted }) {
  $("counts").textContent = `${running} running, ${waiting} waiting`;
  $("no-requests").hidden = requests.length > 0;
  $("unlisted").hidden = unlisted === 0;
  $("unlisted").textContent = `and ${count(unlisted)} more that wait`;
  const seen = new Set(requests.map((request) => request.id));
  for (const [id, row] of rows) {
    if (seen.has(id)) continue;
    row.remove();
    rows.delete(id);
  }
  requests.forEach((request, place) => {
    const row = rows.get(request.id) ?? newRow(request.id);
    if ($("requests").children[place] !== row) $("requests").insertBefore(row, $("requests").children[place] ?? null);
    fillRow(row, request);
  });
}

function newRow(id) {
  const row = document.createElement("li");
  const part = (parent, tag, className) => {
    const made = document.createElement(tag);
    made.className = className;
    parent.append(made);
    return made;
  };
  const head = part(row, "div", "row-head");
  part(head, "span", "glyph").setAttribute("aria-hidden", "true");
  part(head, "span", "name").textContent = `Request ${id}`;
  part(head, "span", "state");
  part(head, "span", "detail quiet");
  const bar = part(row, "div", "bar");
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-label", `Request ${id}`);
  part(bar, "span", "prompt");
  part(bar, "span", "answer");
  part(bar, "span", "border");
  part(row, "p", "extra quiet");
  rows.set(id, row);
  return row;
}

function fillRow(row, request) {
  const whole = request.prompt_tokens + request.max_tokens;
  // a cache that keeps nothing says 0 of a request that has long begun to answer
  const past = request.state === "decoding" || request.state === "finished";
  const prompt = past ? request.prompt_tokens : Math.min(request.computed_tokens, request.prompt_tokens);
  const percent = (tokens) => `${((100 * tokens) / whole).toFixed(2)}%`;
  const set = (selector, text) => (row.querySelector(selector).textContent = text);
  row.dataset.state = request.state;
  set(".glyph", GLYPHS[request.state] ?? "•");
  set(".state", request.state);
  set(".detail", details(request, prompt));
  set(".extra", extras(request));
  const bar = row.querySelector(".bar");
  bar.querySelector(".prompt").style.width = percent(prompt);
  bar.querySelector(".answer").style.width = percent(request.tokens);
  bar.querySelector(".answer").style.left = percent(request.prompt_tokens);
  bar.querySelector(".border").style.left = percent(request.prompt_tokens);
  bar.setAttribute("aria-valuenow", String(Math.round((100 * (prompt + request.tokens)) / whole)));
  bar.setAttribute("aria-valuetext", [request.state, details(request, prompt), extras(request)].join(" "));
}

function details(request, prompt) {
  const began = `prompt ${count(prompt)} of ${count(request.prompt_tokens)}`;
  const went = `${count(request.tokens)} of ${count(request.max_tokens)} tokens`;
  const seconds = request.seconds.toFixed(request.seconds < 10 ? 1 : 0);
  return `${request.tokens ? went : began} · ${seconds} s`;
}

/** What is seldom so. */
function extras({ preemptions, priority }) {
  const parts = [];
  if (preemptions) parts.push(preemptions === 1 ? "preempted once" : `preempted ${preemptions} times`);
  if (priority) parts.push(`priority ${priority}`);
  return parts.join(", ");
}

// ---- blocks

function drawBlocks(blocks) {
  $("blocks-card").hidden = blocks === null;
  if (blocks === null) return; // this cache has no blocks
  const { total, held, kept, size } = blocks;
  const each = Math.ceil(total / CELLS), cells = Math.ceil(total / each);
  const grid = $("grid");
  while (grid.childElementCount > cells) grid.lastChild.remove();
  while (grid.childElementCount < cells) grid.append(document.createElement("i"));
  // rounded up, so that one block of thousands is seen too
  const holding = Math.ceil(held / each), keeping = Math.min(cells, holding + Math.ceil(kept / each));
  [...grid.children].forEach((cell, i) => {
    const kind = i < holding ? "held" : i < keeping ? "kept" : "free";
    if (cell.className !== kind) cell.className = kind;
  });
  const free = total - held - kept;
  grid.setAttribute("aria-label", `${count(held)} blocks held, ${count(kept)} kept, ${count(free)} free`);
  $("held").textContent = `${count(held)} of ${count(total)}`;
  $("held-count").textContent = count(held);
  $("kept-count").textContent = count(kept);
  $("free-count").textContent = count(free);
  const square = each === 1 ? "A square is a block" : `A square stands for ${count(each)} blocks`;
  $("scale").textContent = `${square} of ${size} tokens; what is kept serves a prompt that begins alike.`;
}

// ---- totals

const TOTALS = {
  tokens: "tokens",
  finished: "answers",
  aborted: "given up",
  preemptions: "preemptions",
  prefix_hits: "prompt tokens found in the cache",
};

function drawTotals(totals) {
  if (!$("totals").childElementCount) {
    for (const [name, words] of Object.entries(TOTALS)) {
      const box = document.createElement("div"), value = document.createElement("dd"), term = document.createElement("dt");
      value.dataset.total = name;
      term.textContent = words;
      box.append(term, value);
      $("totals").append(box);
    }
  }
  for (const value of $("totals").querySelectorAll("dd")) value.textContent = count(totals[value.dataset.total]);
}
