// Renders inline Markdown: code, emphasis, links, formulas. Elements and text nodes only; images become
// links and are never loaded.

import { formula } from "./math.js";

// Each alternative begins with its own mark and stops at the next, so there is no backtracking.
const INLINE = new RegExp(
  [
    /\\\(((?:[^\\\n]|\\(?!\))){1,500})\\\)/, // a formula
    /(?<![\\$\w])\$(?![\s$])([^$\n]{1,500})(?<![\s\\])\$(?![\w$])/, // another form, but not an amount of money
    /\\([!-/:-@[-`{-~])/, // an escaped mark
    /(?<!`)(`+)(?!`)([^`]+)\4(?!`)/,
    /\*\*\*([^*\n]+)\*\*\*/,
    /\*\*([^*\n]+)\*\*/,
    /(?<!\w)__([^_\n]+)__(?!\w)/,
    /\*([^*\s][^*\n]*)\*/,
    /(?<!\w)_([^_\s][^_\n]*)_(?!\w)/,
    /~~([^~\n]+)~~/,
    /!?\[([^\][\n]{0,500})\]\((https?:\/\/[^\s()<>]{1,2000})(?: "[^"\n]{0,200}")?\)/,
    /<?(https?:\/\/[^\s<>()[\]"'`*]{1,2000})>?/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "g",
);

/** @returns {Node[]} */
export function inline(text) {
  const nodes = [];
  let end = 0;
  const plain = (piece) => piece && nodes.push(document.createTextNode(piece));
  for (const match of text.matchAll(INLINE)) {
    plain(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [whole, round, dollars, escaped, , code, both, star, under, italic, slanted, struck, label, address, bare] = match;
    if ((round ?? dollars) !== undefined) nodes.push(formula((round ?? dollars).trim(), whole, false));
    else if (escaped !== undefined) plain(escaped);
    else if (code !== undefined) nodes.push(element("code", code));
    else if (both !== undefined) nodes.push(wrapped("strong", element("em", both)));
    else if (star ?? under) nodes.push(wrapped("strong", ...inside(star ?? under)));
    else if (italic ?? slanted) nodes.push(wrapped("em", ...inside(italic ?? slanted)));
    else if (struck !== undefined) nodes.push(element("del", struck));
    else if (address !== undefined) nodes.push(...link(label || address, address));
    else nodes.push(...bareLink(whole, bare));
  }
  plain(text.slice(end));
  return nodes;
}

/** Emphasis may contain code, and nothing else. */
function inside(text) {
  return text.split(/(`[^`]+`)/).filter(Boolean).map((piece) =>
    piece.length > 2 && piece.startsWith("`") && piece.endsWith("`")
      ? element("code", piece.slice(1, -1))
      : document.createTextNode(piece),
  );
}

function bareLink(whole, address) {
  const [, bare, stop] = /^(.*?)([.,;:!?]{0,3})$/s.exec(address); // punctuation of the sentence, not of the address
  const isBracketed = whole.startsWith("<") && whole.endsWith(">");
  if (isBracketed) return link(address, address);
  const before = whole.startsWith("<") ? [document.createTextNode("<")] : [];
  const after = whole.endsWith(">") ? `${stop}>` : stop;
  return [...before, ...link(bare, bare), ...(after ? [document.createTextNode(after)] : [])];
}

function link(label, address) {
  const host = hostOf(address);
  if (host === null) return [document.createTextNode(label)];
  const shown = element("a", label);
  shown.href = address; // http or https by the pattern: never javascript:
  shown.title = address;
  shown.target = "_blank";
  shown.rel = "noopener noreferrer nofollow";
  // A label that names another address than the link's deceives, so the address is shown too.
  const isPlain = label === address || !/[\w-]\.[a-z]{2,}/i.test(label) || label.includes(host);
  return isPlain ? [shown] : [shown, document.createTextNode(` (${host})`)];
}

function hostOf(address) {
  try {
    return new URL(address).host;
  } catch {
    return null;
  }
}

function element(name, text) {
  return wrapped(name, document.createTextNode(text));
}

function wrapped(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
