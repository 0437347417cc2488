// Renders TeX formulas as MathML. The library is loaded with the first formula; until then, and for
// unsupported TeX, a formula stays as written. It builds elements, no markup.

const LIBRARY = "/static/vendor/temml.js";
const OPTIONS = { throwOnError: true, trust: false, maxExpand: 200, maxSize: [25, 25] };
const MAX_KEPT = 200; // formulas, which are shown again with each piece of text

let library = null;
let isLoading = false;
const kept = new Map(); // rendered formulas by their source

/**
 * @param {string} tex
 * @param {string} source the formula with its marks, as written.
 * @param {boolean} isDisplay whether it is a display formula.
 * @returns {HTMLElement}
 */
export function formula(tex, source, isDisplay) {
  const box = document.createElement(isDisplay ? "div" : "span");
  box.className = "math";
  if (library) {
    box.append(rendered(tex, isDisplay) ?? source);
  } else {
    box.dataset.tex = tex;
    box.append(source);
    load();
  }
  return box;
}

async function load() {
  if (isLoading) return;
  isLoading = true;
  try {
    library = (await import(LIBRARY)).default;
  } catch {
    return; // no server: show formulas as written
  }
  for (const box of document.querySelectorAll(".math[data-tex]")) {
    const shown = rendered(box.dataset.tex, box.localName === "div");
    if (shown) box.replaceChildren(shown);
    delete box.dataset.tex;
  }
}

/** @returns {Element|null} null if the library cannot render it. */
function rendered(tex, isDisplay) {
  const name = `${isDisplay} ${tex}`;
  if (!kept.has(name)) {
    if (kept.size >= MAX_KEPT) kept.delete(kept.keys().next().value);
    kept.set(name, render(tex, isDisplay));
  }
  return kept.get(name)?.cloneNode(true) ?? null;
}

function render(tex, isDisplay) {
  const holder = document.createElement("span");
  try {
    library.render(tex, holder, { ...OPTIONS, displayMode: isDisplay });
  } catch {
    return null;
  }
  return holder.firstElementChild;
}
