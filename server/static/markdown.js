// Text of a model as the reader should see it: paragraphs, headings, lists, quotes, code, emphasis.
// Builds elements and text nodes and nothing else, so that no text can become a script, an image or
// a form. Links are shown with their address and open nowhere by themselves.

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const BULLET = /^\s{0,3}[-*+]\s+(.*)$/;
const NUMBER = /^\s{0,3}(\d{1,9})[.)]\s+(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
// Each alternative begins with its own mark and stops at the next: no text makes them try twice.
const INLINE = /(`+)([^`]+)\1|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\][]+)\]\((https?:\/\/[^\s()]+)\)/g;
const MAX_DEPTH = 6; // of quotes in quotes

/**
 * Return a text as elements.
 *
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  /** Take lines as long as they match. */
  const takeWhile = (pattern) => {
    const matches = [];
    for (let match; at < lines.length && (match = pattern.exec(lines[at])); at += 1) matches.push(match);
    return matches;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      at += 1;
      const begin = at;
      while (at < lines.length && !closes(lines[at], fence[1])) at += 1;
      found.push(codeBlock(lines.slice(begin, at).join("\n"), fence[2]));
      at += 1;
    } else if (heading) {
      at += 1;
      // The page has headings of its own above these.
      found.push(element(`h${Math.min(6, heading[1].length + 2)}`, inline(heading[2])));
    } else if (RULE.test(line)) {
      at += 1;
      found.push(element("hr", []));
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      found.push(element("blockquote", blocks(takeWhile(QUOTE).map((match) => match[1]), depth + 1)));
    } else if (BULLET.test(line)) {
      found.push(element("ul", takeWhile(BULLET).map((match) => element("li", inline(match[1])))));
    } else if (NUMBER.test(line)) {
      const items = takeWhile(NUMBER);
      const list = element("ol", items.map((match) => element("li", inline(match[2]))));
      list.start = Number(items[0][1]);
      found.push(list);
    } else {
      const begin = at;
      do at += 1;
      while (at < lines.length && lines[at].trim() && !beginsBlock(lines[at], depth));
      found.push(element("p", inline(lines.slice(begin, at).join("\n"))));
    }
  }
  return found;
}

function closes(line, mark) {
  const bare = line.trim();
  return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
}

function beginsBlock(line, depth) {
  const quotes = depth < MAX_DEPTH && QUOTE.test(line);
  return quotes || [FENCE, HEADING, RULE, BULLET, NUMBER].some((pattern) => pattern.test(line));
}

function inline(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    nodes.push(document.createTextNode(text.slice(end, match.index)));
    end = match.index + match[0].length;
    const [, , code, strong, emphasis, label, address] = match;
    if (code !== undefined) nodes.push(element("code", [document.createTextNode(code)]));
    else if (strong !== undefined) nodes.push(element("strong", [document.createTextNode(strong)]));
    else if (emphasis !== undefined) nodes.push(element("em", [document.createTextNode(emphasis)]));
    else nodes.push(link(label, address));
  }
  nodes.push(document.createTextNode(text.slice(end)));
  return nodes;
}

function link(label, address) {
  const shown = element("a", [document.createTextNode(label)]);
  shown.href = address; // http or https by the pattern: never javascript:
  shown.title = address;
  shown.target = "_blank";
  shown.rel = "noopener noreferrer nofollow";
  return shown;
}

function codeBlock(text, language) {
  const code = element("code", [document.createTextNode(text)]);
  const block = element("pre", [code]);
  block.tabIndex = 0; // else a keyboard could not scroll it
  if (language) block.setAttribute("aria-label", `Code, ${language}`);
  return block;
}

function element(name, children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
