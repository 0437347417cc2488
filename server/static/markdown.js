// Renders Markdown of a model: paragraphs, headings, lists, tables, quotes, code, emphasis, links,
// formulas. Builds only elements and text nodes, so that no text can become a script, an image or a
// form. Links show their target, which is http or https.

import { colored } from "./code_colors.js";
import { inline } from "./markdown_inline.js";
import { formula } from "./math.js";

const FENCE = /^ {0,3}(?:(`{3,})([^`]*)|(~{3,})(.*))$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s{0,40})(?:[-*+]|(\d{1,9})[.)])(?:\s+(.*))?$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}(?:(?:-\s*){3,}|(?:\*\s*){3,}|(?:_\s*){3,})$/;
const TABLE_RULE = /^\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?$/;
const INDENT = /^ */;
const FORMULA = /^ {0,3}(\$\$|\\\[)(.*)$/;
const MAX_FORMULA_LINES = 40;
const MAX_DEPTH = 6; // of nested quotes and lists
const MAX_COLUMNS = 32;
const LONGEST_LANGUAGE = 24;

/**
 * Return the blocks of a text.
 *
 * @param {string[]} lines
 * @returns {{begin: number, node: HTMLElement}[]} each with its first line.
 */
export function parseBlocks(lines, depth = 0) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const begin = at;
    const [node, end] = block(lines, at, depth);
    at = end;
    found.push({ begin, node });
  }
  return found;
}

/** @returns {[HTMLElement, number]} the block that begins here, and the next line. */
function block(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return fencedCode(lines, at, fence);
  const heading = HEADING.exec(line);
  // The page's own headings have higher levels.
  if (heading) return [element(`h${Math.min(6, heading[1].length + 2)}`, inline(withoutMarks(heading[2]))), at + 1];
  if (RULE.test(line)) return [element("hr", []), at + 1];
  if (depth < MAX_DEPTH && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (beginsTable(lines, at)) return table(lines, at);
  const found = formulaAt(lines, at);
  if (found) return [formula(found.tex, lines.slice(at, found.end).join("\n"), true), found.end];
  return paragraph(lines, at, depth);
}

function fencedCode(lines, at, [, ticks, afterTicks, tildes, afterTildes]) {
  const mark = ticks ?? tildes;
  const [language] = (afterTicks ?? afterTildes).trim().split(/\s/, 1);
  let end = at + 1;
  while (end < lines.length && !closes(lines[end], mark)) end += 1;
  return [codeBlock(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

/** Find a formula between `$$`, or `\[` and `\]`, on separate lines. @returns {{tex: string, end: number}|null} */
function formulaAt(lines, at) {
  const match = FORMULA.exec(lines[at]);
  if (!match) return null;
  const close = match[1] === "$$" ? "$$" : "\\]";
  const parts = [];
  for (let end = at; end < Math.min(lines.length, at + MAX_FORMULA_LINES); end += 1) {
    const line = end === at ? match[2] : lines[end];
    const place = line.indexOf(close);
    parts.push(place < 0 ? line : line.slice(0, place));
    if (place < 0) continue;
    const tex = parts.join("\n").trim();
    return tex && !line.slice(place + close.length).trim() ? { tex, end: end + 1 } : null;
  }
  return null;
}

function quote(lines, at, depth) {
  const inner = [];
  let end = at;
  for (let match; end < lines.length && (match = QUOTE.exec(lines[end])); end += 1) inner.push(match[1]);
  return [element("blockquote", nodes(inner, depth + 1)), end];
}

/** A list continues over empty lines and over text that is indented below its items. */
function list(lines, at, depth) {
  const [, indent, number] = ITEM.exec(lines[at]);
  const isOrdered = number !== undefined;
  const items = [];
  let end = at;
  for (let next = at; next < lines.length; next += 1) {
    const line = lines[next];
    const item = ITEM.exec(line);
    const isMine = item && item[1].length <= indent.length + 1;
    if (isMine && ((item[2] !== undefined) !== isOrdered || RULE.test(line))) break;
    if (isMine) items.push([item[3] ?? ""]);
    else if (!line.trim()) items.at(-1).push("");
    else if (INDENT.exec(line)[0].length > indent.length + 1) items.at(-1).push(line.slice(indent.length + 2));
    else break;
    if (line.trim()) end = next + 1;
  }
  const made = element(isOrdered ? "ol" : "ul", items.map((inner) => element("li", itemNodes(inner, depth + 1))));
  if (isOrdered) made.start = Number(number);
  return [made, end];
}

/** The only paragraph of an item needs no element. */
function itemNodes(lines, depth) {
  const [first, ...rest] = nodes(lines, depth);
  return first?.localName === "p" ? [...first.childNodes, ...rest] : [first, ...rest].filter(Boolean);
}

function beginsTable(lines, at) {
  const rule = lines[at + 1];
  return rule !== undefined && lines[at].includes("|") && rule.includes("-") && TABLE_RULE.test(rule.trim())
    && cells(lines[at]).length === cells(rule).length;
}

function table(lines, at) {
  const sides = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "end") : ""));
  const row = (line, kind) => {
    const shown = cells(line).slice(0, sides.length);
    return element("tr", shown.map((text, column) => {
      const cell = element(kind, inline(text));
      if (sides[column]) cell.className = `to-${sides[column]}`;
      return cell;
    }));
  };
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const body = lines.slice(at + 2, end).map((line) => row(line, "td"));
  const made = element("table", [element("thead", [row(lines[at], "th")]), element("tbody", body)]);
  const frame = element("div", [made]);
  frame.className = "table";
  scrollable(frame, "Table");
  return [frame, end];
}

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return bare.split(/(?<!\\)\|/, MAX_COLUMNS).map((text) => text.trim().replaceAll("\\|", "|"));
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end, depth)) end += 1;
  return [element("p", inline(lines.slice(at, end).join("\n"))), end];
}

function interrupts(lines, at, depth) {
  const line = lines[at];
  const nested = depth < MAX_DEPTH && (QUOTE.test(line) || (ITEM.exec(line)?.[3] ?? "") !== "");
  return nested || [FENCE, HEADING, RULE].some((pattern) => pattern.test(line)) || beginsTable(lines, at)
    || formulaAt(lines, at) !== null;
}

function nodes(lines, depth) {
  return parseBlocks(lines, depth).map(({ node }) => node);
}

function closes(line, mark) {
  const bare = line.trim();
  return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
}

/** Remove the closing marks of a heading. */
function withoutMarks(text) {
  let end = text.trimEnd().length;
  while (end > 0 && text[end - 1] === "#") end -= 1;
  return end === 0 || text[end - 1] === " " ? text.slice(0, end).trimEnd() : text;
}

function codeBlock(text, language) {
  const code = element("code", colored(text, language));
  const pre = element("pre", [code]);
  const name = language.slice(0, LONGEST_LANGUAGE);
  scrollable(pre, name ? `Code, ${name}` : "Code");
  const label = element("span", [document.createTextNode(name || "code")]);
  const copy = element("button", [document.createTextNode("Copy code")]);
  copy.type = "button";
  copy.className = "quiet copy-code";
  copy.hidden = !navigator.clipboard; // only on secure pages and localhost
  const head = element("div", [label, copy]);
  head.className = "code-head";
  const frame = element("div", [head, pre]);
  frame.className = "code";
  return frame;
}

/** Make it scrollable by keyboard. */
function scrollable(frame, name) {
  frame.tabIndex = 0;
  frame.setAttribute("role", "group");
  frame.setAttribute("aria-label", name);
}

function element(name, children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
