// Draws a series as a small line. Knows numbers and one SVG element; the words beside it say what
// they are, so it is hidden from those who listen.

const NAMESPACE = "http://www.w3.org/2000/svg";
const WIDTH = 120;
const HEIGHT = 32;

/**
 * @param {SVGElement} svg
 * @param {(number|null)[]} values the latest last; null leaves a gap.
 * @param {number} places how many fit.
 */
export function drawSparkline(svg, values, places) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const highest = Math.max(...values.map((value) => value ?? 0), Number.MIN_VALUE);
  const x = (place) => ((place + places - values.length) * WIDTH) / (places - 1);
  const y = (value) => HEIGHT - 2 - (value / highest) * (HEIGHT - 6);
  let line = "";
  values.forEach((value, place) => {
    if (value === null) return;
    const isNew = place === 0 || values[place - 1] === null;
    line += `${isNew ? "M" : "L"}${x(place).toFixed(1)} ${y(value).toFixed(1)}`;
    if (isNew && (values[place + 1] ?? null) === null) line += "h1"; // alone, but to be seen
  });
  const path = svg.firstElementChild ?? svg.appendChild(document.createElementNS(NAMESPACE, "path"));
  path.setAttribute("d", line);
}
