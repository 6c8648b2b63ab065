// What is asked of the server, and what went wrong in words. Knows no elements of the page.

import { usable } from "./store.js";
import { several } from "./words.js";

const KEY = "mlxmoe.key";

// Its message is for people.
export class Trouble extends Error {}

// The user gave no key: not to be asked again before they do something.
export class KeyTrouble extends Trouble {}

// The API key: of this tab, or of this browser where the user said so.
export class Key {
  constructor() {
    this.value = usable("sessionStorage")?.getItem(KEY) ?? usable("localStorage")?.getItem(KEY) ?? null;
  }

  set(value, keep) {
    this.forget();
    this.value = value;
    try {
      usable(keep ? "localStorage" : "sessionStorage")?.setItem(KEY, value);
    } catch {
      // Full: the key holds until the page is left.
    }
  }

  forget() {
    this.value = null;
    usable("sessionStorage")?.removeItem(KEY);
    usable("localStorage")?.removeItem(KEY);
  }
}

export class Api {
  // `askKey(wrong)`: resolves once the user has given a key (true) or not (false).
  constructor(key, askKey) {
    this.key = key;
    this.askKey = askKey;
    this.asking = null;
  }

  async models(signal) {
    return (await (await this.fetch("v1/models", { signal })).json()).data;
  }

  async status(signal) {
    return (await this.fetch("api/status?heat=1", { signal }, false)).json();
  }

  // The chunks of a streamed reply. `onQueue(count)`: that many are before it.
  async *stream(path, body, signal, onQueue) {
    const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
    const answer = await this.fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    let finished = false;
    try {
      for await (const line of lines(answer.body)) {
        if (line.startsWith(":")) {
          const queued = /^: ?queued (\d+)/.exec(line);
          if (queued) onQueue(Number(queued[1]));
        } else if (line.startsWith("data:")) {
          const data = line.slice(5).trim();
          if (data === "[DONE]") return;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Trouble(`The server broke off: ${chunk.error.message ?? "it does not say why"}`);
          finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
          yield chunk;
        }
      }
    } catch (error) {
      if (error instanceof Trouble || error.name === "AbortError") throw error;
      if (error instanceof SyntaxError) throw new Trouble("The server sent something that is no reply.");
      throw new Trouble("The connection was lost before the reply was finished.");
    }
    if (!finished) throw new Trouble("The connection ended before the reply was finished.");
  }

  async fetch(path, options, ask = true) {
    for (let tried = false; ; tried = true) {
      const used = this.key.value;
      const answer = await this.once(path, options);
      if (answer.ok) return answer;
      if (answer.status !== 401) throw await refused(answer);
      if (this.key.value !== used) continue; // another request has just got a new one
      const again = ask && (await (this.asking ??= this.askForKey(tried || used !== null)));
      if (!again) throw new KeyTrouble("The server wants an API key.");
    }
  }

  // One dialog, however many requests want it.
  async askForKey(wrong) {
    try {
      return await this.askKey(wrong);
    } finally {
      this.asking = null;
    }
  }

  async once(path, options) {
    const headers = { ...options.headers };
    if (this.key.value !== null) headers.Authorization = `Bearer ${this.key.value}`;
    try {
      return await fetch(path, { ...options, headers, cache: "no-store", redirect: "error" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Trouble("The server cannot be reached. Is it still running, and are you in the same network?");
    }
  }
}

async function refused(answer) {
  let said = "";
  try {
    said = String((await answer.json()).error?.message ?? "");
  } catch {
    // No JSON: the status has to do.
  }
  const wait = Number(answer.headers.get("Retry-After"));
  const when = wait > 0 ? ` Try again in ${several(Math.ceil(wait), "second")}.` : "";
  if (answer.status === 429) return new Trouble(`The queue is full: too many replies are waiting.${when}`);
  if (answer.status === 503) return new Trouble(`The server takes no new work now. ${said}${when}`.trim());
  if (answer.status >= 500) return new Trouble(`The server failed (${answer.status}). ${said}`.trim());
  return new Trouble(`The server refused this (${answer.status}). ${said}`.trim());
}

async function* lines(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split(/\r?\n/);
      rest = parts.pop();
      yield* parts;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}
