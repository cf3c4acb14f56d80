// ONNX Runtime for Node.js beside attn: as onnx_peer.py, for where Python's is not installed.
const fs = require('fs');
let ort;
try {
  ort = require('onnxruntime-node');
} catch {
  console.error('onnxruntime-node is not installed where Node.js looks for it (NODE_PATH)');
  process.exit(1);
}
if (process.argv[2] === '--version') {
  const file = require.resolve('onnxruntime-node').replace(/onnxruntime-node.*/, 'onnxruntime-node/package.json');
  console.log(`ONNX Runtime ${JSON.parse(fs.readFileSync(file)).version}`);
  process.exit(0);
}

const gauss = n => Float32Array.from({ length: n }, () =>
  Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random()));

function read(folder, name) {
  const data = fs.readFileSync(`${folder}/${name}.npy`), begin = 10 + data.readUInt16LE(8);
  return Float32Array.from({ length: (data.length - begin) / 4 }, (_, i) => data.readFloatLE(begin + 4 * i));
}

// [heads, length, dim], those that attn_bench saved or normal ones.
const numbers = (folder, name, count) => folder ? read(folder, name).subarray(0, count) : gauss(count);

// [heads, length, dim] as [length, heads, dim].
function rows(x, heads, length, dim) {
  const y = new Float32Array(x.length);
  for (let h = 0; h < heads; h++)
    for (let t = 0; t < length; t++)
      y.set(x.subarray((h * length + t) * dim, (h * length + t + 1) * dim), (t * heads + h) * dim);
  return y;
}

async function prepare(one, length, folder = '') {
  const { heads, dim } = one, decodes = one.form.includes('_decode'), fresh = decodes ? 1 : length;
  const queries = decodes ? one.queries_per_key_head * heads : heads;
  const tensor = (name, h) => new ort.Tensor('float32', rows(numbers(folder, name, h * fresh * dim), h, fresh, dim),
    [1, fresh, h * dim]);
  const feeds = { q: tensor('query', queries), k: tensor('key', heads), v: tensor('value', heads) };
  const session = await ort.InferenceSession.create(one.model, {
    intraOpNumThreads: Number(process.env.ATTN_PEER_THREADS || 1), interOpNumThreads: 1 });
  if (one.form === 'full_softmax') return () => session.run(feeds);
  const int = (x, dims) => new ort.Tensor('int32', Int32Array.from([x]), dims);
  Object.assign(feeds, { sl: int(length - 1, [1]), tl: int(length, []) });
  // Only the result is asked for: where the cache is, too, Node.js takes three times as long to hand it over. Several
  // caches in turn, as of a model's layers.
  const layers = decodes && !folder ? Math.max(1, Math.floor(2 ** 28 / (8 * heads * length * dim))) : 1;
  const cache = name => {
    const x = new Float32Array(heads * length * dim);
    if (decodes) {
      const past = numbers(folder, name, heads * (length - 1) * dim), size = (length - 1) * dim;
      for (let h = 0; h < heads; h++) x.set(past.subarray(h * size, (h + 1) * size), h * length * dim);
    }
    return x;
  };
  const first = [cache('key'), cache('value')];
  const caches = Array.from({ length: layers }, () =>
    first.map(x => new ort.Tensor('float32', x.slice(), [1, heads, length, dim])));
  let turn = 0;
  return () => {
    const [pk, pv] = caches[turn++ % layers];
    return session.run({ ...feeds, pk, pv }, ['o']);
  };
}

async function secondsOf(call) {
  const begin = process.hrtime.bigint();
  await call();
  return Number(process.hrtime.bigint() - begin) / 1e9;
}

async function errorOf(one) {
  const length = one.checked, found = (await (await prepare(one, length, one.folder))()).o;
  const queries = found.dims[2] / one.dim, fresh = found.dims[1];
  const expected = rows(read(one.folder, `${one.form}_${length}`), queries, fresh, one.dim);
  let off = 0, norm = 0;
  expected.forEach((y, i) => { off += (found.data[i] - y) ** 2; norm += y * y; });
  return Math.sqrt(off / norm);
}

async function main() {
  for (const one of JSON.parse(fs.readFileSync(0))) {
    if (!one.model) continue;
    const line = { name: one.key };
    try {
      const short = await prepare(one, one.length / 4);
      await short();
      const expected = await secondsOf(short) * (one.linear ? 4 : 16);
      if (expected > one.most_seconds) {
        line.note = `expected to take ${expected.toFixed(0)} s`;
      } else {
        const call = await prepare(one, one.length), times = [];
        if (expected < 1) await call();
        for (let sum = 0; times.length < 50 && (times.length < 3 && sum < 4 * one.seconds || sum < one.seconds);)
          sum += times[times.push(await secondsOf(call)) - 1];
        Object.assign(line, { ms: 1e3 * Math.min(...times), runs: times.length });
      }
      if (one.folder) line.error = await errorOf(one);
    } catch (error) {  // one operator that a version does not have is no reason to lose the others
      delete line.ms;
      line.note = String(error).split('\n')[0].slice(0, 200);
    }
    console.log(JSON.stringify(line));
  }
}
main();
