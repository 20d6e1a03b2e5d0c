// The KV pool as squares, coloured by owner. The order is that of prefixes, not of places in memory.
import { PALETTE_SIZE } from "./requests.js";

const LARGEST = 15;
const SMALLEST = 5;
const MAX_HEIGHT = 370;

export class Pool {
  constructor(byId) {
    this.byId = byId;
    this.canvas = byId("pool");
    this.snapshot = null;
    this.squares = [];
    this.layout = null;
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("mousemove", (event) => this.hint(event));
  }

  show(snapshot) {
    this.snapshot = snapshot;
    const { cells } = snapshot;
    if (!cells) return;
    const part = (n) => `${(100 * n) / cells.total}%`;
    this.byId("m-live").style.width = part(cells.used - cells.cached);
    this.byId("m-cached").style.width = part(cells.cached);
    this.byId("cells").textContent =
      `${cells.used - cells.cached} in use · ${cells.cached} cached · ${cells.free} free of ${cells.total} cells`;
    this.draw();
    this.legend();
  }

  /** Size of a square, squares in a row, cells a square stands for. */
  fit(total, width) {
    for (let size = LARGEST; size >= SMALLEST; size -= 1) {
      const columns = Math.floor(width / size);
      if (columns && Math.ceil(total / columns) * size <= MAX_HEIGHT) return { size, columns, each: 1 };
    }
    const columns = Math.max(1, Math.floor(width / SMALLEST));
    const each = Math.ceil(total / (columns * Math.floor(MAX_HEIGHT / SMALLEST)));
    return { size: SMALLEST, columns, each };
  }

  draw() {
    const { snapshot, canvas } = this;
    if (!snapshot?.cells) return;
    const width = canvas.parentElement.clientWidth - 32;
    if (width <= 0) return;
    const total = snapshot.cells.total;
    const { size, columns, each } = (this.layout = this.fit(total, width));
    const count = Math.ceil(total / each);
    const height = Math.ceil(count / columns) * size;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.width = `${columns * size}px`;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(columns * size * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(columns * size * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, columns * size, height);
    this.squares = this.assign(count, each);
    const colors = this.colors();
    const gap = size > 8 ? 2 : 1;
    this.squares.forEach((run, index) => {
      const x = (index % columns) * size;
      const y = Math.floor(index / columns) * size;
      this.square(pen, run, index, x, y, size - gap, colors);
    });
  }

  square(pen, run, index, x, y, side, colors) {
    if (!run) {
      pen.fillStyle = colors.free;
      pen.fillRect(x, y, side, side);
      return;
    }
    const [owners] = run;
    if (!owners.length) {
      pen.fillStyle = colors.cached;
      pen.fillRect(x, y, side, side);
      return;
    }
    const owner = owners[index % owners.length];
    pen.fillStyle = colors.owners[owner % PALETTE_SIZE];
    pen.fillRect(x, y, side, side);
    if (owners.length > 1) {
      pen.fillStyle = colors.mark;
      const dot = Math.max(2, Math.round(side / 3));
      pen.fillRect(x + (side - dot) / 2, y + (side - dot) / 2, dot, dot);
    } else if (this.isParked(owner)) {
      pen.fillStyle = colors.mark;
      pen.beginPath();
      pen.moveTo(x, y + side);
      pen.lineTo(x + side, y);
      pen.lineTo(x + side, y + side * 0.45);
      pen.lineTo(x + side * 0.45, y + side);
      pen.fill();
    }
  }

  isParked(sequence) {
    return this.snapshot.requests.some((request) => request.sequence === sequence && request.state === "parked");
  }

  /** The run that each square shows; runs of one owner lie together, shared and cached ones first. */
  assign(count, each) {
    const rank = ([owners]) => (owners.length > 1 ? 0 : owners.length ? 1 : 2);
    const runs = [...(this.snapshot.pool ?? [])].sort(
      (a, b) => rank(a) - rank(b) || (a[0][0] ?? 0) - (b[0][0] ?? 0) || a[2] - b[2],
    );
    const squares = new Array(count).fill(null);
    let cell = 0;
    for (const run of runs) {
      for (let at = Math.ceil(cell / each); at * each < cell + run[3] && at < count; at += 1) squares[at] = run;
      cell += run[3];
    }
    return squares;
  }

  colors() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    const owners = Array.from({ length: PALETTE_SIZE }, (_, index) => read(`--c${index}`));
    return { owners, free: read("--cell-free"), cached: read("--cell-cached"), mark: read("--cell-mark") };
  }

  legend() {
    const held = new Map();
    let shared = 0;
    for (const [owners, , , cells] of this.snapshot.pool ?? []) {
      if (owners.length > 1) shared += cells;
      for (const owner of owners) held.set(owner, (held.get(owner) ?? 0) + cells);
    }
    const entries = [...held].sort((a, b) => a[0] - b[0]).slice(0, 16);
    const items = entries.map(([owner, cells]) => this.entry(`--c${owner % PALETTE_SIZE}`, `#${owner} ${cells}`, this.isParked(owner) ? "parked" : ""));
    if (shared) items.push(this.entry("--c0", `shared ${shared}`, "shared"));
    items.push(this.entry("--cell-cached", `cached ${this.snapshot.cells.cached}`, ""));
    items.push(this.entry("--cell-free", `free ${this.snapshot.cells.free}`, ""));
    if (this.layout?.each > 1) items.push(document.createTextNode(`a square is ${this.layout.each} cells`));
    this.byId("pool-legend").replaceChildren(...items);
  }

  entry(color, text, kind) {
    const item = document.createElement("span");
    const mark = document.createElement("i");
    mark.className = kind;
    mark.style.setProperty("--mark", `var(${color})`);
    item.append(mark, text);
    return item;
  }

  hint(event) {
    if (!this.layout) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.layout.size);
    const line = Math.floor((event.clientY - box.top) / this.layout.size);
    const run = this.squares[line * this.layout.columns + column];
    this.canvas.title = run ? describe(run) : "free";
  }
}

function describe([owners, slots, start, cells]) {
  const tokens = `tokens ${start} to ${start + cells - 1}, ${cells} cells`;
  if (!owners.length) return `cached prefix: ${tokens}`;
  const whose = owners.map((owner) => `#${owner}`).join(", ");
  return `${whose}: ${tokens}${slots > 1 ? `, shared by ${slots} slots` : ""}`;
}
