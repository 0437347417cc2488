// Draws line charts as inline SVG: sparklines beside figures, and charts with axes and units, a
// legend with the latest values, and values at the pointer or, by the arrow keys, at any time.

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [480, 170];
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 470, 10, 146]; // of the lines
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
const exact = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

/** Return the end of an axis from 0 that includes `highest`, and the step between its gridlines (at most four). */
export function scaleOf(highest) {
  if (!(highest > 0)) return { end: 1, step: 1 };
  const size = 10 ** Math.floor(Math.log10(highest / 4));
  const step = size * [1, 2, 2.5, 5, 10].find((one) => 4 * one * size >= highest * 0.9999);
  return { end: step * Math.ceil((highest / step) * 0.9999), step };
}

/** Return the commands of an SVG path; null leaves a gap. */
export function pathOf(values, x, y) {
  let path = "";
  values.forEach((value, place) => {
    if (value === null) return;
    const isNew = place === 0 || values[place - 1] === null;
    path += `${isNew ? "M" : "L"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    if (isNew && (values[place + 1] ?? null) === null) path += "h1"; // makes a single value visible;
  });
  return path;
}

/**
 * Draw a sparkline. It is hidden from screen readers, which read the text beside it.
 *
 * @param {SVGElement} svg
 * @param {(number|null)[]} values oldest first; null leaves a gap.
 * @param {number} places number of values that fit.
 */
export function drawSparkline(svg, values, places) {
  svg.setAttribute("viewBox", "0 0 120 32");
  svg.setAttribute("preserveAspectRatio", "none");
  const highest = Math.max(...values.map((value) => value ?? 0), Number.MIN_VALUE);
  const x = (place) => ((place + places - values.length) * 120) / (places - 1);
  svg.replaceChildren(element("path", { d: pathOf(values, x, (value) => 30 - (value / highest) * 26) }));
}

export class LineChart {
  root;
  #svg;
  #title;
  #format;
  #legend = document.createElement("ul");
  #words = document.createElement("p");
  #times = [];
  #lines = [];
  #place = null;

  /**
   * @param {HTMLElement} parent
   * @param {string} title with the unit.
   * @param {(value: number) => string} format
   */
  constructor(parent, title, format) {
    this.#title = title;
    this.#format = format;
    this.root = parent.appendChild(document.createElement("figure"));
    this.root.className = "chart";
    const caption = this.root.appendChild(document.createElement("figcaption"));
    caption.textContent = title;
    this.#svg = this.root.appendChild(element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, tabindex: 0, role: "img" }));
    this.#legend.className = "chart-legend";
    this.#words.className = "chart-words";
    this.root.append(this.#legend, this.#words);
    this.#svg.addEventListener("pointermove", (event) => this.#point(event));
    this.#svg.addEventListener("pointerleave", () => this.#see(null));
    this.#svg.addEventListener("blur", () => this.#see(null));
    this.#svg.addEventListener("keydown", (event) => this.#step(event));
  }

  /**
   * @param {number[]} times Unix times, increasing.
   * @param {{name: string, values: (number|null)[]}[]} lines
   */
  draw(times, lines) {
    this.#times = times;
    this.#lines = lines;
    const known = lines.flatMap(({ values }) => values.filter((value) => value !== null));
    const { end, step } = scaleOf(Math.max(0, ...known));
    const low = Math.min(0, ...known);
    const { end: depth } = low < 0 ? scaleOf(-low) : { end: 0 };
    const y = (value) => BOTTOM - ((value + depth) / (end + depth)) * (BOTTOM - TOP);
    const parts = [];
    for (let at = 0; at <= end * 1.0001; at += step) parts.push(...this.#levelAt(at, y));
    if (depth) parts.push(...this.#levelAt(-depth, y));
    const count = Math.min(4, times.length);
    for (let n = 0; n < count; n += 1) {
      const place = Math.round((n * (times.length - 1)) / Math.max(1, count - 1));
      parts.push(text(this.#x(place), BOTTOM + 17, clock.format(1000 * times[place]), n === 0 ? "start" : n === count - 1 ? "end" : "middle"));
    }
    lines.forEach(({ values }, number) => {
      const d = pathOf(values, (place) => this.#x(place), y);
      parts.push(element("path", { class: `line line-${number % 8}`, d }));
    });
    parts.push(element("line", { class: "cursor", y1: TOP, y2: BOTTOM, visibility: "hidden" }));
    this.#svg.replaceChildren(...parts);
    const last = lines.map(({ name, values }) => `${name} ${this.#shown(values.at(-1))}`);
    this.#svg.setAttribute("aria-label", `${this.#title}; now ${last.join(", ") || "no data"}`);
    this.#see(this.#place);
  }

  #x(place) {
    const first = this.#times[0];
    const span = this.#times.at(-1) - first;
    return span > 0 ? LEFT + ((this.#times[place] - first) / span) * (RIGHT - LEFT) : RIGHT;
  }

  #levelAt(value, y) {
    const line = element("line", { class: "level", x1: LEFT, x2: RIGHT, y1: y(value), y2: y(value) });
    return [line, text(LEFT - 6, y(value) + 4, this.#format(value), "end")];
  }

  #shown(value) {
    return value === null || value === undefined ? "–" : this.#format(value);
  }

  #point(event) {
    const box = this.#svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const far = this.#times.map((_, place) => Math.abs(this.#x(place) - x));
    this.#see(far.length ? far.indexOf(Math.min(...far)) : null);
  }

  #step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.#times.length) return;
    event.preventDefault();
    const last = this.#times.length - 1;
    this.#see(Math.min(last, Math.max(0, (this.#place ?? last) + (this.#place === null ? 0 : by))));
  }

  /** Show the values at a place; null for the latest. */
  #see(place) {
    this.#place = place !== null && place < this.#times.length ? place : null;
    const at = this.#place ?? this.#times.length - 1;
    const cursor = this.#svg.querySelector(".cursor");
    cursor?.setAttribute("visibility", this.#place === null ? "hidden" : "visible");
    if (this.#place !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, this.#x(at));
    const entries = this.#lines.map(({ name, values }, number) => {
      const entry = document.createElement("li");
      entry.className = `line-${number % 8}`;
      entry.textContent = `${name} ${this.#shown(values[at])}`;
      return entry;
    });
    this.#legend.replaceChildren(...entries);
    const time = at >= 0 ? exact.format(1000 * this.#times[at]) : "";
    this.#words.textContent = at >= 0 ? `${this.#place === null ? "latest: " : ""}${time}` : "No data yet.";
  }
}

function element(name, attributes) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(x, y, words, anchor) {
  const made = element("text", { x, y, "text-anchor": anchor });
  made.textContent = words;
  return made;
}
