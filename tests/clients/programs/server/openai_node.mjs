// A streamed answer by OpenAI's client for JavaScript.
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none" });
const messages = [{ role: "user", content: readFileSync(0, "utf8") }];
const stream = await client.chat.completions.create({
  model: "recall", messages, max_tokens: 24, temperature: 0, stream: true,
});
for await (const piece of stream) process.stdout.write(piece.choices[0]?.delta?.content ?? "");
