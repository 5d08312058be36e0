// llama.cpp as a process that answers one request a line: {"prompt": [ids], "tokens": n, "end": [ids]} → tokens and times.
// usage: node llama_cpp.mjs FILE THREADS CONTEXT, in a folder where `npm install --ignore-scripts node-llama-cpp` was run
import {createRequire} from "node:module";
import {readFileSync} from "node:fs";
import {pathToFileURL} from "node:url";
import {createInterface} from "node:readline";
import process from "node:process";

const [, , file, threads, contextSize] = process.argv;
const require = createRequire(process.cwd() + "/");
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")).href);
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: Number(contextSize), threads: Number(threads)});
const resident = () => Number(/VmRSS:\s+(\d+)/.exec(readFileSync("/proc/self/status", "utf8"))[1]) * 1024;
const version = JSON.parse(readFileSync(require.resolve("node-llama-cpp").replace(/dist.*/, "package.json"))).version;
console.log(JSON.stringify({ready: true, version}));

for await (const line of createInterface({input: process.stdin})) {
    const {prompt, tokens, end} = JSON.parse(line);
    const sequence = context.getSequence();
    const given = [];
    const start = performance.now();
    let first = 0;
    for await (const token of sequence.evaluate(prompt, {temperature: 0, yieldEogToken: true})) {
        if (!given.length) first = performance.now();
        given.push(token);
        if (given.length === tokens || end.includes(token)) break;
    }
    const seconds = (performance.now() - start) / 1000;
    sequence.dispose();
    console.log(JSON.stringify({tokens: given, first: (first - start) / 1000, seconds, resident: resident()}));
}
