// Draws a series of numbers as a small SVG line. It is hidden from screen readers, which read the text
// beside it.

import { pathOf } from "./charts.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 32;

/**
 * @param {SVGElement} svg
 * @param {(number|null)[]} values the latest last; null leaves a gap.
 * @param {number} places how many values fit.
 */
export function drawSparkline(svg, values, places) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const highest = Math.max(...values.map((value) => value ?? 0), Number.MIN_VALUE);
  const x = (place) => ((place + places - values.length) * WIDTH) / (places - 1);
  const y = (value) => HEIGHT - 2 - (value / highest) * (HEIGHT - 6);
  const path = svg.firstElementChild ?? svg.appendChild(document.createElementNS(NAMESPACE, "path"));
  path.setAttribute("d", pathOf(values, x, y));
}
