// Runs two turns of an agent with a tool through the AI SDK's default OpenAI provider (Responses API).
//
// Prints the result as JSON. Arguments: the package directory, the base URL, the questions.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [, , folder, baseURL, ...questions] = process.argv;
const requireHere = createRequire(`${folder}/package.json`);
const load = (name) => import(pathToFileURL(requireHere.resolve(name)));
const { generateText, isStepCount, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { z } = await load("zod");

// Ids that each request referred to instead of sending the items.
const references = [];
const openai = createOpenAI({
  baseURL,
  apiKey: "none",
  fetch: (url, options) => {
    const input = JSON.parse(options.body).input;
    references.push(input.filter((item) => item.type === "item_reference").length);
    return fetch(url, options);
  },
});
const common = {
  model: openai("scripted"),
  maxRetries: 0,
  stopWhen: (stepCountIs ?? isStepCount)(4),
  tools: {
    get_weather: tool({
      description: "Tell the weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => `It is sunny in ${city}.`,
    }),
  },
};

let failure = null;
const texts = [];
const messages = [];
const errors = [];
try {
  for (const [turn, question] of questions.entries()) {
    messages.push({ role: "user", content: question });
    // The first turn as a whole, the others as streams.
    if (turn === 0) {
      const result = await generateText({ ...common, messages });
      texts.push(result.text);
      messages.push(...(result.responseMessages ?? result.response.messages));
    } else {
      const result = streamText({ ...common, messages, onError: ({ error }) => errors.push(error) });
      texts.push(await result.text);
      const response = await result.response;
      messages.push(...((await result.responseMessages) ?? response.messages));
    }
  }
} catch (error) {
  const cause = errors[0] ?? error;
  failure = { status: cause.statusCode ?? null, message: String(cause.message) };
}
console.log(JSON.stringify({ texts, references, failure }));
