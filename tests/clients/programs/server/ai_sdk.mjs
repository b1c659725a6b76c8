// A streamed answer by the AI SDK.
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";

const provider = createOpenAICompatible({ name: "kvflash", baseURL: process.argv[2] });
const { textStream } = streamText({
  model: provider("recall"), prompt: readFileSync(0, "utf8"), maxOutputTokens: 24, temperature: 0,
});
for await (const text of textStream) process.stdout.write(text);
