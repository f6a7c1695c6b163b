// `node llama.mjs MODEL THREADS`: what src/bin/throughput.rs measures, by llama.cpp's prebuilt CPU library.
import {getLlama} from "node-llama-cpp";

const [path, threads] = [process.argv[2], Number(process.argv[3] ?? 2)];
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 1024, batchSize: 512, sequences: 1, threads});
const sequence = context.getSequence();
const prompt = Array.from({length: 512}, (_, i) => 100 + (i * 37) % 20000);
let [prefill, decode] = [0, 0];
for (let round = 0; round < 5; round++) {
    await sequence.clearHistory();
    let start = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(prompt);
    prefill = Math.max(prefill, (512 * 1000) / (performance.now() - start));
    let count = -1;
    for await (const _ of sequence.evaluate([100], {temperature: 0, yieldEogToken: true})) {
        if (++count === 0) start = performance.now();
        if (count === 128) break;
    }
    decode = Math.max(decode, (128 * 1000) / (performance.now() - start));
}
console.log(JSON.stringify({prefill: +prefill.toFixed(1), decode: +decode.toFixed(1)}));
process.exit(0);
