// The messages of one conversation on the page. Reads messages, changes none.

import { announce, byId, copyButton, el, icon } from "./dom.js";
import { GrowingMarkdown } from "./markdown.js";
import { rate, several } from "./words.js";

const NEAR = 48; // pixels from the bottom that count as at the bottom
const ENOUGH = 8; // tokens that a rate can be told from

export class Thread {
  // `acts`: again(message), edit(message, text).
  constructor(acts) {
    this.acts = acts;
    this.root = byId("thread");
    this.scroller = byId("scroller");
    this.latest = byId("latest");
    this.pinned = true;
    this.views = new Map(); // message -> its view
    this.scroller.addEventListener("scroll", () => this.look(), { passive: true });
    this.latest.addEventListener("click", () => {
      this.toEnd();
      byId("prompt").focus();
    });
    new ResizeObserver(() => this.follow()).observe(this.scroller);
  }

  show(conversation, model) {
    this.views.clear();
    this.model = model;
    this.root.replaceChildren();
    if (model?.continues) this.root.append(el("p", { class: "plain-note" }, "This model has no chat template: it does not answer, it goes on with your text."));
    if (!conversation.messages.length) this.root.append(empty(model));
    for (const message of conversation.messages) this.add(message);
    this.toEnd();
  }

  add(message) {
    this.root.querySelector(".empty")?.remove();
    const view = message.role === "user" ? new Said(message, this.acts) : new Written(message, this, this.model);
    this.views.set(message, view);
    this.root.append(view.root);
  }

  changed(message) {
    this.views.get(message)?.changed();
  }

  ended(message) {
    this.views.get(message)?.ended(true);
  }

  look() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.pinned = scrollHeight - scrollTop - clientHeight < NEAR;
    this.latest.hidden = this.pinned;
  }

  toEnd() {
    this.pinned = true;
    this.latest.hidden = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  // Stay at the end, for who was there.
  follow() {
    if (this.pinned) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

function empty(model) {
  const words = model?.continues ? "Begin a text, and the model goes on with it." : "Ask something, or paste a text to work on.";
  const image = el("img", { src: "icon.svg", alt: "" });
  return el("div", { class: "empty" }, image, el("h2", {}, "What is on your mind?"), el("p", {}, words, " It stays between this browser and your server."));
}

// What the user said.
class Said {
  constructor(message, acts) {
    this.message = message;
    this.acts = acts;
    this.body = el("div", { class: "body", dir: "auto" }, message.content || "(go on)");
    const edit = el("button", { type: "button", class: "action", onclick: () => this.edit() }, icon("rename"), "Edit");
    this.actions = el("div", { class: "actions" }, copyButton("Copy this message", () => message.content), edit);
    this.root = el("article", { class: "message user", "aria-label": "You" }, this.body, this.actions);
  }

  edit() {
    const area = el("textarea", { "aria-label": "Your message", dir: "auto", rows: Math.min(12, this.message.content.split("\n").length + 1) });
    area.value = this.message.content;
    const close = () => {
      form.replaceWith(this.body, this.actions);
      this.root.classList.remove("editing");
    };
    const cancel = () => {
      close();
      this.actions.lastElementChild.focus();
    };
    const buttons = el("div", { class: "buttons" }, el("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"), el("button", { type: "submit", class: "primary" }, "Send"));
    const form = el("form", { class: "edit" }, area, buttons);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!area.value.trim()) return;
      close();
      this.acts.edit(this.message, area.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === area) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    this.actions.remove();
    this.root.classList.add("editing");
    area.focus();
  }
}

// What the model writes.
class Written {
  constructor(message, thread, model) {
    this.message = message;
    this.thread = thread;
    this.shown = 0; // characters of the content
    this.thought = null;
    this.spoken = true; // only what is written from now on is read out
    this.frame = 0;
    this.rested = 0; // when the next drawing may be, so that drawing takes a part of the time only
    this.body = el("div", { class: model?.continues ? "body plain" : "body" });
    this.waiting = el("p", { class: "waiting" });
    this.after = el("div");
    this.root = el("article", { class: "message assistant", "aria-label": "Reply" }, this.waiting, this.body, this.after);
    this.root.classList.toggle("continuing", Boolean(model?.continues));
    if (model?.continues) this.body.append("");
    this.text = model?.continues ? plain(this.body.firstChild) : new GrowingMarkdown(this.body, (node) => this.say(node));
    this.draw();
    if (message.state === "going") this.spoken = false;
    else this.ended(false);
  }

  changed() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (performance.now() < this.rested) this.changed();
      else this.draw();
    });
  }

  draw() {
    const began = performance.now();
    const { message } = this;
    if (message.reasoning) this.think(message.reasoning);
    if (message.content.length > this.shown) {
      this.text.append(message.content.slice(this.shown));
      this.shown = message.content.length;
    }
    this.waiting.hidden = message.state !== "going" || this.shown > 0;
    const words = waitingWords(message);
    if (!this.waiting.hidden && this.waiting.textContent !== words) this.waiting.textContent = words;
    this.thread.follow();
    const ended = performance.now();
    this.rested = ended + 3 * Math.min(ended - began, 100) - 12;
  }

  think(reasoning) {
    if (!this.thought) {
      this.thought = el("div", { class: "thought", dir: "auto" }, "");
      const details = el("details", { class: "reasoning" }, el("summary", {}, "Reasoning"), this.thought);
      this.body.before(details);
    }
    const node = this.thought.firstChild;
    if (reasoning.length > node.length) node.appendData(reasoning.slice(node.length));
  }

  // `now`: it has just ended, while one looked.
  ended(now) {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.text.end();
    const { message } = this;
    const note = endWords(message);
    this.after.replaceChildren();
    if (note) this.after.append(el("p", { class: "note" }, note));
    if (message.error) this.after.append(this.failure(message.error, now));
    this.after.append(this.actions());
    if (now && note) announce(note);
    if (now && this.root.querySelector(".body.plain")) announce(message.content.slice(0, 2000));
    this.thread.follow();
  }

  failure(error, now) {
    const again = el("button", { type: "button", class: "quiet", onclick: () => this.thread.acts.again(this.message) }, "Try again");
    return el("div", { class: "failure", role: now ? "alert" : null }, el("p", {}, error), again);
  }

  actions() {
    const { message, thread } = this;
    const again = el("button", { type: "button", class: "action again", onclick: () => thread.acts.again(message) }, icon("again"), thread.model?.continues ? "Write anew" : "Regenerate");
    const row = el("div", { class: "actions" });
    if (message.content) row.append(copyButton("Copy this reply", () => message.content));
    if (!message.error) row.append(again);
    const measured = message.tokens >= ENOUGH && message.seconds > 0 ? ` at ${rate((message.tokens - 1) / message.seconds)} tok/s` : "";
    if (message.tokens) row.append(el("span", { class: "measured" }, several(message.tokens, "token") + measured));
    return row;
  }

  // A finished paragraph is read out; of code and tables only that they are there.
  say(node) {
    if (this.spoken) return;
    if (node.matches(".code")) announce(`Code of ${several(node.querySelector("code").textContent.split("\n").length, "line")}.`);
    else announce(node.matches(".table") ? "A table." : node.textContent);
  }
}

const plain = (node) => ({ append: (text) => node.appendData(text), end: () => {} });

function waitingWords({ queued, reasoning }) {
  if (queued > 0) return queued === 1 ? "Waiting: one reply is before this one." : `Waiting: ${queued} replies are before this one.`;
  return reasoning ? "Thinking" : "Reading the prompt";
}

function endWords({ state, finish, content }) {
  if (state === "stopped") return content ? "You stopped it here." : "You stopped it before it began.";
  if (state === "left") return "The page was left before the reply was finished.";
  if (state === "elsewhere") return "It is being written in another tab.";
  if (finish === "length") return "It ends here: the most tokens that were allowed.";
  if (finish === "memory") return "It ends here: the machine ran short of memory.";
  return state === "done" && !content ? "The model said nothing." : "";
}
