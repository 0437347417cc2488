// Colours code: comments, strings, numbers and keywords, found by one pattern each. Builds spans and
// text nodes; unknown languages and very long code stay plain.

const LONGEST = 10_000; // characters: the whole block is coloured again with each piece of text

const WORDS = {
  python: `and as assert async await break case class continue def del elif else except False finally for from global
    if import in is lambda match None nonlocal not or pass raise return self True try while with yield`,
  script: `abstract as async await boolean break case catch class const continue debugger declare default delete do else
    enum export extends false finally for from function if implements import in instanceof interface let new null number
    of private protected public readonly return static string super switch this throw true try type typeof undefined
    var void while yield`,
  compiled: `abstract auto bool boolean break byte case catch char class const constexpr continue crate default defer
    delete do double dyn else enum explicit export extends extern false final finally float fn for func go goto if impl
    implements import in include inline int interface let long loop map match mod mut namespace new nil null nullptr
    override package private protected pub public range return self short signed sizeof static string struct super switch
    template this throw trait true try type typedef typename union unsafe unsigned use using var virtual void volatile
    where while`,
  shell: `break case continue do done elif else esac exit export fi for function if in local return set then unset until
    while`,
  data: "true false null yes no on off",
  sql: `add all alter and as asc begin between by case commit create delete desc distinct drop else end exists foreign
    from full group having in index inner insert into is join key left like limit not null on or order outer primary
    references returning right rollback select set table then union unique update values view when where with`,
};
const HASH = /#[^\n]*/;
const SLASHES = /\/\/[^\n]*|\/\*[^*]*(?:\*(?!\/)[^*]*)*(?:\*\/)?/;
const DASHES = /--[^\n]*/;
const STRING = /"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?/;
const TEMPLATE = /`(?:[^`\\]|\\[^])*`?/;
const BLOCK_STRING = /"""[^"]*(?:"(?!"")[^"]*)*(?:""")?|'''[^']*(?:'(?!'')[^']*)*(?:''')?/;
const NUMBER = /\b\d[\w.]*/;
const WORD = /[A-Za-z_$][\w$]*/;

const FAMILIES = {
  python: { comments: [HASH], strings: [BLOCK_STRING, STRING], words: WORDS.python },
  script: { comments: [SLASHES], strings: [TEMPLATE, STRING], words: WORDS.script },
  compiled: { comments: [SLASHES], strings: [STRING], words: WORDS.compiled },
  shell: { comments: [HASH], strings: [STRING], words: WORDS.shell },
  data: { comments: [HASH], strings: [STRING], words: WORDS.data },
  json: { comments: [], strings: [STRING], words: WORDS.data },
  sql: { comments: [DASHES, SLASHES], strings: [STRING], words: WORDS.sql, ignoresCase: true },
};
const LANGUAGES = {
  python: "py python python3",
  script: "js javascript jsx mjs ts typescript tsx",
  compiled: "c cpp c++ cc h hpp cs csharp go java kotlin kt rs rust scala swift",
  shell: "bash sh shell zsh console",
  data: "yaml yml toml ini",
  json: "json jsonc",
  sql: "sql",
};
const FAMILY_OF = new Map(
  Object.entries(LANGUAGES).flatMap(([family, names]) => names.split(" ").map((name) => [name, prepared(FAMILIES[family])])),
);

/** @returns {Node[]} the coloured code, with unchanged text. */
export function colored(text, language) {
  const family = text.length <= LONGEST && FAMILY_OF.get(language.toLowerCase());
  if (!family) return [document.createTextNode(text)];
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  let end = 0;
  for (const match of text.matchAll(family.pattern)) {
    plain += text.slice(end, match.index);
    end = match.index + match[0].length;
    const kind = kindOf(match.groups, family);
    if (kind) {
      flush();
      nodes.push(span(match[0], kind));
    } else {
      plain += match[0];
    }
  }
  plain += text.slice(end);
  flush();
  return nodes;
}

function kindOf({ comment, string, number, word }, { words, ignoresCase }) {
  if (comment !== undefined) return "comment";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  return words.has(ignoresCase ? word.toLowerCase() : word) ? "word" : null;
}

function prepared({ comments, strings, words, ignoresCase = false }) {
  const any = (patterns) => patterns.map(({ source }) => source).join("|");
  const kinds = [`(?<string>${any(strings)})`, `(?<number>${NUMBER.source})`, `(?<word>${WORD.source})`];
  if (comments.length > 0) kinds.unshift(`(?<comment>${any(comments)})`);
  return { pattern: new RegExp(kinds.join("|"), "g"), words: new Set(words.split(/\s+/)), ignoresCase };
}

function span(text, kind) {
  const made = document.createElement("span");
  made.className = `code-${kind}`;
  made.append(text);
  return made;
}
