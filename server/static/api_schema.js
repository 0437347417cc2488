// Describes JSON Schemas for /docs: the type and bounds of a field, and a small valid example.

const DEEPEST = 8; // levels of an example; schemas may hold themselves
const BOUNDS = {
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<",
  minLength: "chars ≥", maxLength: "chars ≤", minItems: "items ≥", maxItems: "items ≤", pattern: "matches",
};
const WORDS = { role: "user", content: "Hello!", text: "Hello!", query: "What is a lynx?", name: "look_up", tool_call_id: "call_1" };

/** Resolve a reference; other schemas are returned as they are. */
export function resolve(document, schema) {
  const name = schema?.$ref?.replace("#/components/schemas/", "");
  return name ? document.components.schemas[name] : schema ?? {};
}

/** The alternatives of a schema without null; a schema without alternatives is its only one. */
export function alternatives(schema) {
  const found = schema.anyOf ?? schema.oneOf ?? [schema];
  return found.filter((one) => one.type !== "null");
}

/** A type in a few words, such as `string | array of integer`. */
export function typeText(document, schema) {
  const words = alternatives(schema).map((one) => {
    if (one.$ref) return one.$ref.split("/").at(-1);
    if (one.anyOf || one.oneOf) return typeText(document, one);
    if ("const" in one) return JSON.stringify(one.const);
    if (one.enum) return one.enum.map((value) => JSON.stringify(value)).join(" | ");
    if (one.type === "array") return `array of ${one.items ? typeText(document, one.items) : "anything"}`;
    return [one.type ?? "anything"].flat().filter((name) => name !== "null").join(" | ");
  });
  return [...new Set(words)].join(" | ") || "null";
}

/** Bounds of a field, in words. */
export function boundsText(schema) {
  return alternatives(schema)
    .flatMap((one) => Object.entries(BOUNDS).filter(([key]) => key in one).map(([key, word]) => `${word} ${one[key]}`))
    .join(", ");
}

/** The object schema inside a field, also in arrays and alternatives; null if there is none. */
export function objectIn(document, schema, depth = 0) {
  if (depth > DEEPEST) return null;
  for (const one of alternatives(resolve(document, schema))) {
    const found = resolve(document, one);
    if (found.properties) return found;
    const inner = found.type === "array" && found.items ? found.items : found.anyOf || found.oneOf ? found : null;
    const object = inner && inner !== schema ? objectIn(document, inner, depth + 1) : null;
    if (object) return object;
  }
  return null;
}

/** The fields that meet each unmet condition in the first possible way. */
function neededByConditions(schema) {
  const conditions = (schema.allOf ?? []).map((one) => one.anyOf ?? []).filter((ways) => ways.length && ways.every((way) => way.required));
  return conditions.flatMap((ways) => ways[0].required);
}

/** A small valid value: only what is required. */
export function example(document, given, name = "", depth = 0) {
  const schema = resolve(document, given);
  if (depth > DEEPEST) return null;
  if ("const" in schema) return schema.const;
  if (schema.enum) return schema.enum.includes(WORDS[name]) ? WORDS[name] : schema.enum.find((value) => value !== null) ?? null;
  const [first] = alternatives(schema);
  if (!first) return null;
  if (first !== schema) return example(document, first, name, depth + 1);
  const type = [schema.type].flat().find((one) => one !== "null");
  if (type === "object" || schema.properties) {
    const needed = [...(schema.required ?? []), ...neededByConditions(schema)];
    return Object.fromEntries(needed.map((key) => [key, example(document, schema.properties?.[key] ?? {}, key, depth + 1)]));
  }
  if (type === "array") return Array.from({ length: Math.max(1, schema.minItems ?? 0) }, () => example(document, schema.items ?? {}, name, depth + 1));
  if (type === "integer" || type === "number") return name === "max_tokens" ? 64 : schema.minimum ?? 1;
  if (type === "boolean") return true;
  return WORDS[name] ?? "Hello!";
}
