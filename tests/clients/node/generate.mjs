// node generate.mjs ADDRESS PROMPT [SAMPLING] [MESSAGES]
//
// Streams the continuation of a prompt. SAMPLING is a JSON object with fields of SamplingParams.
// After that many MESSAGES it cancels the request. Standard error receives one JSON object: the
// statistics, or the error with its details.
import grpc from "@grpc/grpc-js";
import { Client, describe } from "./client.mjs";

const [address, prompt, sampling = "{}", limit = "Infinity"] = process.argv.slice(2);
if (prompt === undefined) {
  console.error("usage: node generate.mjs ADDRESS PROMPT [SAMPLING] [MESSAGES]");
  process.exit(2);
}
const report = (value) => process.stderr.write(JSON.stringify(value) + "\n");
const client = new Client(address);
const tokenIds = [];
let numMessages = 0;
let seed, last;
try {
  const request = { text: prompt, sampling: JSON.parse(sampling) };
  for await (const message of client.generate(request)) {
    process.stdout.write(message.text);
    tokenIds.push(...message.tokenIds);
    seed ??= message._seed && message.seed;
    last = message;
    numMessages += 1;
    if (numMessages >= Number(limit)) break;
  }
  const { model } = await client.modelInfo();
  const { finishReason, usage, statistics } = last;
  report({ model, seed, tokenIds, finishReason, usage, statistics });
} catch (error) {
  if (!(error.code in grpc.status)) throw error; // not of a call: a bug here
  report(describe(error));
  process.exitCode = 1;
} finally {
  client.close();
}
