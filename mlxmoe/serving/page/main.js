// The page put together: which conversation is shown, and what the user's acts do to it.

import { Api, Key, KeyTrouble } from "./api.js";
import { announce, byId, el, toast } from "./dom.js";
import { Drawer } from "./drawer.js";
import { Panel } from "./panel.js";
import { Reply } from "./reply.js";
import { askKey, SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store, usable } from "./store.js";
import { Thread } from "./thread.js";

const SAVE_EVERY = 1000; // milliseconds, while a reply comes in
const TITLE = 60; // characters of the first message
const LOOK_AGAIN = 4000; // milliseconds, for a server that does not answer
const PIECE = 256; // tokens that a text without a chat goes on for; less where the context is small

const key = new Key();
const api = new Api(key, (wrong) => askKey(key, wrong));
const store = new Store(showTrouble, changedElsewhere);
const running = new Map(); // conversation id -> its Reply
const thread = new Thread({ again, edit });
const sidebar = new Sidebar({ open, rename, remove });
const panel = new Panel(api);
const prompt = byId("prompt");
let current = null;
let model = null; // what is known of it, once the server has said so
let lookAgain = 0;

function showTrouble(words) {
  const banner = byId("banner");
  banner.hidden = !words;
  banner.replaceChildren();
  if (words) banner.append(el("span", {}, words), el("button", { type: "button", class: "quiet", onclick: exportAll }, "Export"));
}

function changedElsewhere(id) {
  if (id === current.id && !running.has(id)) open(id);
  refresh();
}

// Conversations

function open(id) {
  current = store.conversations.get(id) ?? (current?.id === id && !current.messages.length ? current : store.create());
  store.current = current.id;
  thread.show(current, model);
  prompt.value = store.draft(draftKey());
  side.over && side.toggle(false);
  refresh();
}

function begin() {
  if (current.messages.length) open(null);
  side.over && side.toggle(false);
  prompt.focus();
}

// A conversation that nothing was said in is not kept, but its draft is.
const draftKey = () => (current.messages.length ? current.id : "new");

function rename(id, title) {
  const conversation = store.conversations.get(id);
  if (conversation && title !== conversation.title) {
    Object.assign(conversation, { title, named: true });
    store.save(conversation);
  }
  refresh();
}

function remove(id) {
  const conversation = store.conversations.get(id);
  const draft = store.draft(id);
  running.get(id)?.stop();
  store.remove(id);
  if (id === current.id) open(store.list()[0]?.id ?? null);
  refresh();
  const undo = () => {
    store.save(conversation);
    store.keepDraft(id, draft);
    open(id);
  };
  toast(`Deleted “${shorten(conversation.title, 30)}”.`, "Undo", undo).focus();
}

function exportAll() {
  const text = JSON.stringify({ format: "mlxmoe conversations", version: 1, conversations: store.list() }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: "mlxmoe-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function shorten(text, most) {
  const line = text.trim().split("\n")[0];
  return line.length > most ? `${line.slice(0, most - 1).trimEnd()}…` : line;
}

// Messages

function send() {
  const text = model?.continues ? prompt.value : prompt.value.trim();
  const goesOn = model?.continues && current.messages.length > 0;
  if (running.has(current.id) || (!text.trim() && !goesOn)) return;
  store.keepDraft(draftKey(), "");
  prompt.value = "";
  const message = { role: "user", content: text };
  current.messages.push(message);
  if (!current.named) current.title ||= shorten(text, TITLE);
  thread.add(message);
  ask();
}

// Ask for what comes after the last message.
function ask() {
  const conversation = current;
  const message = { role: "assistant", content: "", state: "going" };
  conversation.messages.push(message);
  conversation.updated = Date.now();
  thread.add(message);
  thread.toEnd();
  let saved = performance.now();
  const keep = () => {
    saved = performance.now();
    if (store.conversations.has(conversation.id)) store.save(conversation);
  };
  const changed = () => {
    thread.changed(message);
    if (performance.now() - saved > SAVE_EVERY) keep();
  };
  const ended = () => {
    if (running.get(conversation.id) === reply) running.delete(conversation.id);
    thread.ended(message);
    keep();
    refresh();
    if (message.state === "failed") watchModel(); // it may be another one now, or none
  };
  store.save(conversation);
  const reply = new Reply(api, async () => model ?? findModel(), store.settings, conversation, { changed, ended });
  running.set(conversation.id, reply);
  announce("The reply begins.");
  refresh();
}

function stop() {
  running.get(current.id)?.stop();
}

// Another reply in place of the last one.
function again(message) {
  if (running.has(current.id)) return;
  replaceFrom(message, message.content ? "The earlier reply was replaced." : "");
  ask();
}

function edit(message, text) {
  if (text === message.content) return;
  stop();
  running.delete(current.id);
  replaceFrom(message, "The earlier message and what came after it were replaced.");
  const said = { role: "user", content: text };
  current.messages.push(said);
  thread.add(said);
  ask();
}

// Take away a message and all after it; they can be had back.
function replaceFrom(message, words) {
  const conversation = current;
  const before = [...conversation.messages];
  conversation.messages = before.slice(0, before.indexOf(message));
  thread.show(conversation, model);
  if (!words) return;
  toast(words, "Undo", () => {
    running.get(conversation.id)?.stop();
    running.delete(conversation.id);
    conversation.messages = before;
    store.save(conversation);
    open(conversation.id);
  });
}

// What shows the state of things

function refresh() {
  sidebar.show(store.list(), current.id, running);
  const title = current.title || "New conversation";
  byId("title").textContent = title;
  document.title = current.title ? `${title} · mlxmoe` : "mlxmoe";
  const busy = running.has(current.id);
  const focused = [byId("send"), byId("stop")].includes(document.activeElement);
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  if (focused) (busy ? byId("stop") : prompt).focus();
  fit();
}

function fit() {
  const goesOn = Boolean(model?.continues && current.messages.length);
  byId("send").disabled = !prompt.value.trim() && !goesOn;
  byId("send").setAttribute("aria-label", model?.continues ? "Go on" : "Send");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

async function findModel() {
  model = null;
  const [found] = await api.models();
  const facts = found.mlxmoe ?? {};
  const piece = Math.max(1, Math.min(PIECE, Math.floor((facts.context ?? 4 * PIECE) / 4)));
  model = { id: found.id, continues: facts.has_chat_template === false, piece };
  const context = facts.context ? ` · ${facts.context.toLocaleString("en-US")} tokens of context` : "";
  byId("model").textContent = found.id + context;
  prompt.placeholder = model.continues ? "Begin a text, or leave this empty to go on" : "Write a message";
  byId("max-tokens-hint").textContent = model.continues ? `Empty: ${piece}.` : "Empty: as many as the server grants.";
  if (Boolean(thread.model?.continues) !== model.continues && !running.size) thread.show(current, model);
  fit();
  return model;
}

// Find the model, as soon as the server answers.
async function watchModel() {
  clearTimeout(lookAgain);
  try {
    await findModel();
  } catch (error) {
    byId("model").textContent = error.message;
    if (!(error instanceof KeyTrouble)) lookAgain = setTimeout(watchModel, LOOK_AGAIN);
  }
}

function switchTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const now = document.documentElement.dataset.theme ?? system;
  const next = now === "dark" ? "light" : "dark";
  if (next === system) delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    usable("localStorage")?.setItem("mlxmoe.theme", next === system ? "system" : next);
  } catch {
    // Full: the theme holds until the page is left.
  }
  showTheme();
}

function showTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme;
  const now = dark === "light dark" ? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light") : dark;
  byId("theme").setAttribute("aria-label", now === "dark" ? "Change to the light theme" : "Change to the dark theme");
  panel.heatmap.recolour();
}

// Put together

const side = new Drawer({
  node: byId("side"), opener: byId("open-side"), closer: byId("close-side"), narrow: "(max-width: 800px)", name: "side",
  set: (open) => byId("app").classList.toggle("side-closed", !open),
});
new Drawer({
  node: byId("panel"), opener: byId("open-panel"), closer: byId("close-panel"), narrow: "(max-width: 1180px)", name: "panel",
  set: (open) => panel.set(open),
});
new SettingsDialog(store, key);
const first = store.current;
open(store.conversations.has(first) ? first : (first === null ? store.list()[0]?.id : null) ?? null);
showTheme();
watchModel();
prompt.focus();

byId("new").addEventListener("click", begin);
byId("export").addEventListener("click", exportAll);
byId("theme").addEventListener("click", switchTheme);
byId("stop").addEventListener("click", stop);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  prompt.focus();
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", () => {
  store.keepDraft(draftKey(), prompt.value);
  fit();
});
prompt.addEventListener("keydown", (event) => {
  const touch = matchMedia("(pointer: coarse)").matches;
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || touch) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]") && !event.isComposing) stop();
});
addEventListener("pagehide", () => {
  for (const reply of running.values()) {
    reply.leave();
    store.save(reply.conversation);
  }
});
addEventListener("beforeunload", (event) => {
  if (store.storage && store.unsaved.size) event.preventDefault();
});
