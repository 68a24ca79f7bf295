/** The test vectors of PROTOCOL.md hold for this implementation. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { LongstepError, ProtocolError } from "../src/errors.js";
import { Kind, packHead, unpackHead } from "../src/heads.js";
import { FrozenSet, NDArray, Tuple, type Value } from "../src/values.js";
import { decode, encode } from "../src/wire.js";

const FILE = process.env["LONGSTEP_VECTORS"] ?? new URL("../../../../tests/bindings/vectors/protocol_v1.json", import.meta.url);
const VECTORS = JSON.parse(readFileSync(FILE, "utf8"));
const frames = (hex: string[]): Uint8Array[] => hex.map((frame) => Buffer.from(frame, "hex"));
const hex = (bytes: Uint8Array): string => Buffer.from(bytes).toString("hex");

/** The value that the vectors' notation stands for. */
function fromNotation(told: any): Value {
  if (told === null || typeof told !== "object") return told;
  if (Array.isArray(told)) return told.map(fromNotation);
  const [[kind, value]] = Object.entries(told) as [[string, any]];
  const bytes = (text: string): Uint8Array => new Uint8Array(Buffer.from(text, "hex"));
  switch (kind) {
    case "int":
      return Number.isSafeInteger(Number(value)) ? Number(value) : BigInt(value);
    case "float":
      return Number(value.replace("inf", "Infinity"));
    case "bytes":
      return bytes(value);
    case "tuple":
      return Tuple.from(value.map(fromNotation)) as Tuple;
    case "set":
      return new Set(value.map(fromNotation));
    case "frozenset":
      return new FrozenSet(value.map(fromNotation));
    case "array":
      return new NDArray(value[0], value[1], bytes(value[2]));
    case "scalar":
      return new NDArray(value[0], null, bytes(value[1]));
  }
  const entries = value.map((entry: any[]) => entry.map(fromNotation));
  return entries.every(([key]: [Value]) => typeof key === "string") ? Object.fromEntries(entries) : new Map(entries);
}

/** A value in a form that compares sets without their order, and bytes whatever their class. */
function comparable(value: Value): unknown {
  if (value instanceof NDArray) return { array: [value.dtype, value.shape, hex(value.data)] };
  if (value instanceof Uint8Array) return { bytes: hex(value) };
  if (value instanceof Set) return { kind: value.constructor.name, members: [...value].map(comparable).sort() };
  if (value instanceof Map) return { map: [...value].map(([key, item]) => [comparable(key), comparable(item)]) };
  if (Array.isArray(value)) return { kind: value.constructor.name, items: value.map(comparable) };
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, comparable(item)]));
}

for (const vector of VECTORS.values) {
  test(`decodes the vector: ${vector.name}`, () => {
    assert.deepEqual(comparable(decode(frames(vector.frames))), comparable(fromNotation(vector.value)));
  });
  const hasWholeFloat = /"float":"-?\d+(\.0|e\+\d+)?"/.test(JSON.stringify(vector.value));
  test(`encodes the vector: ${vector.name}`, () => {
    const again = encode(decode(frames(vector.frames)));
    if (hasWholeFloat) assert.deepEqual(comparable(decode(again)), comparable(decode(frames(vector.frames))));
    else assert.deepEqual(again.map(hex), vector.frames);
  });
}

for (const vector of VECTORS.refused) {
  test(`refuses the vector: ${vector.name}`, () => {
    assert.throws(() => decode(frames(vector.frames)), ProtocolError);
  });
}

for (const vector of VECTORS.heads) {
  test(`reads and writes the head: ${vector.name}`, () => {
    const head = unpackHead(Buffer.from(vector.frame, "hex"));
    assert.equal(Kind[head.kind], vector.name);
    assert.deepEqual(head.fields, vector.fields);
    assert.equal(hex(packHead(head.kind, head.token, ...head.fields)), vector.frame);
  });
}

for (const vector of VECTORS.refused_heads) {
  test(`refuses the head: ${vector.name}`, () => {
    assert.throws(() => unpackHead(Buffer.from(vector.frame, "hex")), ProtocolError);
  });
}

test("changed bytes are protocol errors and nothing else", () => {
  let state = 1;
  const draw = (below: number): number => (state = (state * 48271) % 0x7fffffff) % below;
  let numRefused = 0;
  for (let round = 0; round < 5000; round++) {
    const body = Buffer.from(VECTORS.values[draw(VECTORS.values.length)].frames[0], "hex");
    for (let index = draw(3); index >= 0; index--) body[draw(body.length)] = draw(256);
    try {
      decode([body]);
    } catch (error) {
      assert.ok(error instanceof ProtocolError, String(error));
      numRefused += 1;
    }
  }
  assert.ok(numRefused > 500);
});

test("a key such as __proto__ changes no object", () => {
  const read = decode(encode(JSON.parse('{"__proto__": {"polluted": true}, "a": 1}'))) as { [key: string]: Value };
  assert.equal(({} as any).polluted, undefined);
  assert.deepEqual(Object.keys(read).sort(), ["__proto__", "a"]);
  assert.equal(Object.getPrototypeOf(read), Object.prototype);
});

for (const [value, said] of [
  [{ a: [1, () => 0] }, /got function at \$\.a\[1\]/],
  [{ a: NaN }, /got NaN at \$\.a/],
  [[2n ** 64n], /at most 64 bits, got 18446744073709551616 at \$\[0\]/],
  [{ a: undefined }, /got undefined at \$\.a/],
  ["\ud800", /text that UTF-8 can encode/],
  [new Date(0), /expected a plain object, got Date at \$/],
] as Array<[any, RegExp]>) {
  test(`names the place of what cannot travel: ${said.source}`, () => {
    assert.throws(() => encode(value), (error: LongstepError) => error.kind === "UnsupportedTypeError" && said.test(error.message));
  });
}

test("numbers beyond 2^53 are exact", () => {
  const values = [2 ** 53, 2n ** 53n + 1n, -(2n ** 63n), 2n ** 64n - 1n, -0, 1e300, 0.1];
  assert.deepEqual(decode(encode(values)), values);
});

test("a typed array comes back as it went", () => {
  const pixels = NDArray.from(new Uint8Array(30_000).map((_, index) => index), [100, 100, 3]);
  const [body, ...raw] = encode({ pixels });
  assert.equal(raw.length, 1);
  const read = decode([body as Uint8Array, ...raw]) as unknown as { pixels: NDArray };
  assert.deepEqual(read.pixels.shape, [100, 100, 3]);
  assert.deepEqual(read.pixels.toTypedArray(), pixels.toTypedArray());
});
