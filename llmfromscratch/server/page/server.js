// What the page says to the server, and what went wrong, in a sentence. Addresses are relative to the page's own.

const AWAY = "The server does not answer. It may have been stopped, or the network is down.";

/** A failure as a sentence for the reader. status: the HTTP status, 0 where no answer came. */
export class Refusal extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

/** The key for the Authorization header; it lives as long as the tab. */
export const key = {
  get: () => sessionStorage.getItem("llmfromscratch-key") ?? "",
  set: (value) => sessionStorage.setItem("llmfromscratch-key", value),
};

/** The server's answer to a request; body: sent as JSON where there is one. Throws a Refusal, or the AbortError. */
export async function ask(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let answer;
  try {
    const method = body === undefined ? "GET" : "POST";
    answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    if (headers.Authorization && /[^\x20-\x7e]/.test(key.get())) {
      throw new Refusal("The API key holds a character that no key can have. Type it again in the settings.");
    }
    throw new Refusal(AWAY);
  }
  if (!answer.ok) throw new Refusal(await reason(answer), answer.status);
  return answer;
}

async function reason(answer) {
  let sentence = "";
  try {
    sentence = sentenceOf(await answer.json());
  } catch {
    // no JSON: a proxy's page, which says nothing to the reader of this one
  }
  sentence ||= `The server answered with status ${answer.status} and gave no reason.`;
  if (answer.status === 401 || answer.status === 403) sentence += " The key's place is in the settings.";
  const wait = Number(answer.headers.get("Retry-After"));
  return wait > 0 ? `${sentence} It asks to wait ${wait} ${wait === 1 ? "second" : "seconds"}.` : sentence;
}

/** The message of an error in OpenAI's shape, beginning with a capital and ending with a full stop; else "". */
export function sentenceOf(data) {
  const text = String(data?.error?.message ?? "").trim();
  if (!text) return "";
  return text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

/** The data of a stream of server-sent events, parsed; ends with "[DONE]". Throws a Refusal where it breaks off. */
export async function* events(answer) {
  const broken = new Refusal("The connection broke before the answer was complete.");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : broken;
    }
    if (part.done) throw broken;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
