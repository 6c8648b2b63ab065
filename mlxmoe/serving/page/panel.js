// The panel: what the server says of its memory, speed and experts, each second while someone can see it.

import { byId, el } from "./dom.js";
import { Heatmap } from "./heatmap.js";
import { bytes, duration, percent, rate, several, whole } from "./words.js";

const EVERY = 1000; // milliseconds
const EVERY_WITHOUT_ANSWER = 4000;
const SAMPLES = 60;
const LEVELS = { normal: "good", warning: "warn", critical: "bad" };
const STATES = { ready: "good", loading: "warn", unloaded: "unknown", draining: "warn", failed: "bad" };

export class Panel {
  constructor(api) {
    this.api = api;
    this.heatmap = new Heatmap();
    this.open = false;
    this.timer = 0;
    this.asked = null;
    this.rates = [];
    this.last = null; // hits and misses at the last look
    document.addEventListener("visibilitychange", () => this.watch());
  }

  set(open) {
    this.open = open;
    byId("panel").hidden = !open;
    this.watch();
  }

  // Look now and from now on, or no more.
  watch() {
    clearTimeout(this.timer);
    this.asked?.abort();
    this.asked = null;
    if (this.open && document.visibilityState === "visible") this.look();
  }

  async look() {
    const asked = (this.asked = new AbortController());
    let wait = EVERY;
    try {
      const status = await this.api.status(asked.signal);
      if (!asked.signal.aborted) this.show(status);
    } catch (error) {
      wait = EVERY_WITHOUT_ANSWER;
      if (!asked.signal.aborted) this.lost(error);
    }
    if (!asked.signal.aborted) this.timer = setTimeout(() => this.look(), wait);
  }

  lost(error) {
    chip("state", "no answer", "bad");
    this.notice(`These figures are old. ${error.message}`);
  }

  notice(words) {
    const node = byId("notice");
    node.hidden = !words;
    if (node.textContent !== words) node.textContent = words;
  }

  show(status) {
    chip("state", status.state, STATES[status.state] ?? "unknown");
    this.notice(status.accepts ? "" : `No new work is taken. ${status.reason}`);
    chip("pressure", status.pressure, LEVELS[status.pressure] ?? "unknown");
    showMemory(status.memory);
    this.showRate(status.tokens_per_s ?? 0);
    this.showHits(status.stats);
    byId("batch").textContent = status.best_batch ? `${status.active} of ${status.best_batch}` : String(status.active);
    byId("queue").textContent = status.queued ? `${whole(status.queued)} waiting` : "none waiting";
    this.heatmap.show(status.heat, status.resident, (status.stats?.layers ?? []).map(({ path }) => path));
    const refused = status.refused ? `, ${whole(status.refused)} refused` : "";
    byId("totals").textContent = `${several(status.replies, "reply", "replies")} and ${several(status.tokens, "token")} in ${duration(status.uptime_s)}${refused}.`;
  }

  showRate(perSecond) {
    byId("rate").textContent = rate(perSecond);
    this.rates.push(perSecond);
    if (this.rates.length > SAMPLES) this.rates.shift();
    const top = Math.max(1, ...this.rates);
    const x = (index) => (SAMPLES - this.rates.length + index) * (120 / (SAMPLES - 1));
    const points = this.rates.map((value, index) => `${x(index).toFixed(1)} ${(31 - (29 * value) / top).toFixed(1)}`);
    const spark = byId("spark");
    spark.querySelector(".line").setAttribute("d", `M${points.join("L")}`);
    spark.querySelector(".area").setAttribute("d", `M${x(0).toFixed(1)} 32L${points.join("L")}L120 32Z`);
    spark.setAttribute("aria-label", `Over the last ${several(this.rates.length, "second")}: at most ${rate(Math.max(...this.rates))}, now ${rate(perSecond)}`);
  }

  showHits(stats) {
    byId("hits").textContent = stats ? percent(stats.hit_rate) : "–";
    const hits = stats && this.last ? stats.hits - this.last.hits : 0;
    const misses = stats && this.last ? stats.misses - this.last.misses : 0;
    if (hits + misses > 0) byId("hits-now").textContent = `${percent(hits / (hits + misses))} just now`;
    else byId("hits-now").textContent = stats ? "since loading" : "\u00a0";
    this.last = stats;
  }
}

function chip(id, words, level) {
  const node = byId(id);
  node.textContent = words;
  node.dataset.level = level;
}

function showMemory(memory) {
  if (!memory) {
    byId("budget").textContent = "";
    byId("legend").replaceChildren();
    byId("bar").replaceChildren();
    byId("bar").setAttribute("aria-label", "The model is not in memory");
    return;
  }
  const { plan } = memory;
  const parts = [
    ["trunk", "Trunk", plan.trunk_bytes],
    ["experts", "Experts", memory.bank_bytes],
    ["kv", "KV", memory.kv_bytes],
    ["prefill", "Prefill and pool", plan.prefill_bytes + plan.pool_bytes],
  ];
  const used = parts.reduce((sum, [, , count]) => sum + count, 0);
  parts.push(["free", "Free in the budget", Math.max(0, plan.memory_bytes - used)]);
  const all = Math.max(used, plan.memory_bytes, 1);
  byId("budget").textContent = `budget ${bytes(plan.memory_bytes)}`;
  const bar = byId("bar");
  if (!bar.childElementCount) bar.append(...parts.map(([kind]) => el("span", { class: `part ${kind}` })));
  for (const [index, [kind, , count]] of parts.entries()) {
    const part = bar.children[index];
    part.hidden = !count;
    if (kind !== "free") part.style.width = `calc(${((100 * count) / all).toFixed(3)}% - 2px)`;
  }
  bar.setAttribute("aria-label", `${parts.map(([, name, count]) => `${name} ${bytes(count)}`).join(", ")}; of ${bytes(plan.memory_bytes)}`);
  byId("legend").replaceChildren(
    ...parts.flatMap(([kind, name, count]) => [el("dt", {}, el("span", { class: `swatch ${kind}` }), name), el("dd", {}, bytes(count))]),
  );
}
