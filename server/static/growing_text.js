// Shows formatted text while it grows. Finished parts are not changed again, so that a selection stays
// and a long answer costs only what is added.

import { parseBlocks } from "./markdown.js";

export class GrowingText {
  #root;
  #text = "";
  #settled = 0; // characters before the blocks that may still change
  #growing = []; // the last two: the text after a list may become its next item

  /** @param {HTMLElement} root */
  constructor(root) {
    this.#root = root;
  }

  /** Show this text; cheap if it continues the shown text. */
  show(text) {
    if (text === this.#text) return;
    if (!text.startsWith(this.#text)) this.#clear();
    this.#text = text;
    const rest = text.slice(this.#settled);
    const lines = rest.split("\n");
    const blocks = parseBlocks(lines);
    const before = this.#root.childElementCount - this.#growing.length;
    growAll(this.#root, this.#growing, blocks.map(({ node }) => node));
    const numSettled = Math.max(0, blocks.length - 2);
    this.#growing = [...this.#root.children].slice(before + numSettled);
    const settledLines = lines.slice(0, numSettled > 0 ? blocks[numSettled].begin : 0);
    this.#settled += settledLines.reduce((sum, line) => sum + line.length + 1, 0);
  }

  #clear() {
    this.#root.replaceChildren();
    this.#text = "";
    this.#settled = 0;
    this.#growing = [];
  }
}

/** Make a node equal to another one, changing only where they differ. */
function grow(node, goal) {
  if (node.nodeType === Node.TEXT_NODE && goal.nodeType === Node.TEXT_NODE) {
    if (goal.data.startsWith(node.data)) node.appendData(goal.data.slice(node.data.length));
    else node.data = goal.data;
    return;
  }
  if (!node.cloneNode(false).isEqualNode(goal.cloneNode(false))) {
    node.replaceWith(goal);
    return;
  }
  growAll(node, [...node.childNodes], [...goal.childNodes]);
}

/** Make the last children of a parent equal to these. */
function growAll(parent, children, goals) {
  for (const [place, child] of children.entries()) {
    if (place < goals.length) grow(child, goals[place]);
    else child.remove();
  }
  parent.append(...goals.slice(children.length));
}
