// A streamed answer by LangChain for JavaScript.
import { readFileSync } from "node:fs";
import { ChatOpenAI } from "@langchain/openai";

const llm = new ChatOpenAI({
  model: "recall", apiKey: "none", maxTokens: 24, temperature: 0, configuration: { baseURL: process.argv[2] },
});
for await (const piece of await llm.stream(readFileSync(0, "utf8"))) process.stdout.write(piece.text);
