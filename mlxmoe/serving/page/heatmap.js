// Experts by layers on a canvas: a cell's colour is how much its expert was wanted lately, and whether it is in memory.

import { byId } from "./dom.js";
import { several, whole } from "./words.js";

const HOT = 0.5; // of the most wanted expert's heat
const LEVELS = 32;
const LEAST = 2; // pixels of a cell's width; wider models scroll

export class Heatmap {
  constructor() {
    this.canvas = byId("heat");
    this.readout = byId("readout");
    this.heat = [];
    this.resident = [];
    this.layers = []; // each row's layer number
    this.at = null; // [row, expert] that is pointed at
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => document.activeElement !== this.canvas && this.move(null));
    this.canvas.addEventListener("focus", () => this.at ?? (this.heat.length && this.move([0, 0])));
    this.canvas.addEventListener("blur", () => this.move(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.recolour();
  }

  // The theme has changed.
  recolour() {
    const colour = (name) => {
      this.canvas.style.color = `var(${name})`;
      const [red, green, blue] = getComputedStyle(this.canvas).color.match(/[\d.]+/g).map(Number);
      return [red, green, blue];
    };
    const ramp = (cold, hot) => Array.from({ length: LEVELS }, (_, level) => mix(cold, hot, level / (LEVELS - 1)));
    this.inMemory = ramp(colour("--in-cold"), colour("--in-hot"));
    this.onDisk = ramp(colour("--out-cold"), colour("--out-hot"));
    this.outline = `rgb(${colour("--text").join(" ")})`;
    this.draw();
  }

  // `heat`, `resident`: [layers][experts]; `paths`: of the layers, for their numbers.
  show(heat, resident, paths) {
    this.heat = heat.map((row) => row.map((each) => each ?? 0)); // JSON's null: no number
    this.resident = resident;
    this.layers = heat.map((_, row) => Number(/layers\.(\d+)/.exec(paths[row] ?? "")?.[1] ?? row));
    if (this.at && !(this.at[1] < heat[this.at[0]]?.length)) this.at = null;
    this.draw();
    this.tell();
    const all = heat.flat().length;
    const held = resident.flat().filter(Boolean).length;
    byId("resident").textContent = all ? `${whole(held)} of ${whole(all)} in memory` : "";
    byId("heat-summary").textContent = all ? this.summary() : "No heat is known: the model is not in memory.";
  }

  summary() {
    const size = `${several(this.heat.length, "layer")} of ${several(Math.max(...this.heat.map((row) => row.length)), "expert")}.`;
    const held = this.heat.flatMap((row, layer) => row.flatMap((heat, expert) => (heat >= HOT ? [this.resident[layer]?.[expert]] : [])));
    if (!held.length) return `${size} None was asked for lately.`;
    return `${size} In memory of those with a heat of ${HOT} or more: ${whole(held.filter(Boolean).length)} of ${whole(held.length)}.`;
  }

  draw() {
    const rows = this.heat.length;
    const columns = Math.max(0, ...this.heat.map((row) => row.length));
    this.canvas.hidden = !columns;
    if (!columns) return;
    const scale = devicePixelRatio || 1;
    const room = this.canvas.parentElement.clientWidth * scale;
    this.width = Math.max(room / columns, LEAST * scale);
    this.height = Math.round(Math.min(20, Math.max(3, 250 / rows)) * scale);
    this.canvas.width = Math.round(this.width * columns);
    this.canvas.height = this.height * rows;
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this.paint(this.canvas.getContext("2d"));
  }

  paint(context) {
    const image = context.createImageData(this.canvas.width, this.canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    const gap = this.width >= 5 && this.height >= 5 ? 1 : 0;
    this.heat.forEach((row, layer) => {
      const top = layer * this.height * image.width;
      row.forEach((heat, expert) => {
        const ramp = this.resident[layer]?.[expert] ? this.inMemory : this.onDisk;
        const left = Math.round(expert * this.width); // on whole pixels: some cells are one wider than others
        const level = Math.round(Math.min(1, Math.max(0, heat)) * (LEVELS - 1));
        pixels.fill(ramp[level], top + left, top + Math.round((expert + 1) * this.width) - gap);
      });
      for (let line = 1; line < this.height - gap; line++) {
        pixels.copyWithin(top + line * image.width, top, top + image.width);
      }
    });
    context.putImageData(image, 0, 0);
    if (!this.at) return;
    context.strokeStyle = this.outline;
    context.lineWidth = 2;
    context.strokeRect(this.at[1] * this.width - 1, this.at[0] * this.height - 1, this.width + 2, this.height + 2);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / box.width;
    const row = Math.floor(((event.clientY - box.top) * scale) / this.height);
    const expert = Math.floor(((event.clientX - box.left) * scale) / this.width);
    this.move(this.heat[row]?.[expert] === undefined ? null : [row, expert]);
  }

  key(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -1e6], End: [0, 1e6] };
    const step = steps[event.key];
    if (!step || !this.heat.length) return;
    event.preventDefault();
    const [row, expert] = this.at ?? [0, 0];
    const next = Math.min(this.heat.length - 1, Math.max(0, row + step[0]));
    this.move([next, Math.min(this.heat[next].length - 1, Math.max(0, expert + step[1]))]);
    const seen = this.canvas.parentElement; // a wide model's map scrolls within it
    const left = ((this.at[1] + 0.5) * this.width) / (devicePixelRatio || 1);
    if (left < seen.scrollLeft || left > seen.scrollLeft + seen.clientWidth) seen.scrollLeft = left - seen.clientWidth / 2;
  }

  move(at) {
    if (String(at) === String(this.at)) return;
    this.at = at;
    this.draw();
    this.tell();
  }

  tell() {
    const [row, expert] = this.at ?? [];
    const words = this.at
      ? `Layer ${this.layers[row]}, expert ${expert}: heat ${this.heat[row][expert].toFixed(2)}, ${this.resident[row]?.[expert] ? "in memory" : "on disk"}`
      : "Point at an expert, or move with the arrow keys.";
    if (this.readout.textContent !== words) this.readout.textContent = words;
  }
}

// A pixel between two colours.
function mix(cold, hot, share) {
  const parts = cold.map((part, index) => Math.round(part + (hot[index] - part) * share));
  return new Uint32Array(new Uint8Array([...parts, 255]).buffer)[0];
}
