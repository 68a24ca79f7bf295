/**
 * One value as the frames of a message, and back: msgpack for structure, a raw frame for each large array, limits for both.
 * PROTOCOL.md, section 2. Nothing received is evaluated, and nothing is allocated for what a message only claims to hold.
 */

import { LongstepError, ProtocolError } from "./errors.js";
import { LIMITS, type Limits } from "./limits.js";
import { FrozenSet, NDArray, Tuple, type Value } from "./values.js";

const INLINE_BYTES = 4096;

/** The frames of a value: the body, then one for each large array. Throws for what cannot travel, and says where it stands. */
export function encode(value: Value, limits: Limits = LIMITS): Uint8Array[] {
  const writer = new Writer(limits);
  writer.write(value, "$", 0);
  const frames = [writer.bytes(), ...writer.frames];
  try {
    checkSizes(frames, limits);
  } catch (error) {
    throw new LongstepError("UnsupportedTypeError", `${(error as Error).message}; send less at once`);
  }
  return frames;
}

/** The value of a message's body and raw frames. Throws ProtocolError, and nothing else, for what breaks the protocol. */
export function decode(frames: readonly Uint8Array[], limits: Limits = LIMITS): Value {
  const [body, ...raw] = frames;
  if (body === undefined) throw new ProtocolError("expected a body frame, got none");
  checkSizes(frames, limits);
  const reader = new Reader(body, raw, limits);
  const value = reader.read(0);
  reader.finish();
  return value;
}

/** The bytes of a plain value, such as a head. */
export function pack(value: Value): Uint8Array {
  return encode(value)[0] as Uint8Array;
}

/** The plain value of bytes, such as a head. */
export function unpack(bytes: Uint8Array, maxDepth: number): Value {
  return decode([bytes], { ...LIMITS, max_depth: maxDepth });
}

function checkSizes(frames: readonly Uint8Array[], limits: Limits): void {
  const sizes = frames.map((frame) => frame.byteLength);
  const raw = sizes.slice(1);
  const check = (name: keyof Limits, got: number): void => {
    if (got > limits[name]) throw new ProtocolError(`expected at most ${limits[name]} as ${name}, got ${got}`);
  };
  check("max_body_bytes", sizes[0] ?? 0);
  check("max_frames", raw.length);
  check("max_frame_bytes", raw.reduce((most, size) => Math.max(most, size), 0));
  check("max_message_bytes", sizes.reduce((sum, size) => sum + size, 0));
}

// ---- writing --------------------------------------------------------------------------------------------------------

class Writer {
  readonly frames: Uint8Array[] = [];
  private buffer = Buffer.allocUnsafe(1024);
  private size = 0;
  private numItems = 0;

  constructor(private readonly limits: Limits) {}

  bytes(): Uint8Array {
    return this.buffer.subarray(0, this.size);
  }

  write(value: Value | undefined, place: string, depth: number): void {
    if (++this.numItems > this.limits.max_items)
      throw untransportable(`at most ${this.limits.max_items} values`, "more", place);
    if (value === null) this.byte(0xc0);
    else if (value === false) this.byte(0xc2);
    else if (value === true) this.byte(0xc3);
    else if (typeof value === "string") this.text(value, place);
    else if (typeof value === "number") this.number(value, place);
    else if (typeof value === "bigint") this.integer(value, place);
    else if (value instanceof NDArray) this.array(value);
    else if (value instanceof Uint8Array) {
      this.sized([0xc4, 0xc5, 0xc6], value.byteLength);
      this.raw(value);
    } else if (typeof value === "object") this.container(value, place, depth);
    else throw untransportable("a value that can travel", typeof value, place);
  }

  private container(value: object, place: string, depth: number): void {
    if (depth === this.limits.max_depth) throw untransportable(`at most ${depth} nested containers`, "more", place);
    if (Array.isArray(value)) {
      this.list(value as Value[], value instanceof Tuple ? "t" : "", place, depth);
    } else if (value instanceof Set) {
      const members = [...(value as Set<Value>)];
      for (const member of members) checkKey(member, place);
      this.list(members.sort(compareMembers), value instanceof FrozenSet ? "f" : "s", place, depth);
    } else {
      const isPlain = value instanceof Map || [Object.prototype, null].includes(Object.getPrototypeOf(value));
      if (!isPlain) throw untransportable("a plain object", value.constructor?.name ?? "another", place);
      const entries = value instanceof Map ? [...(value as Map<Value, Value>)] : Object.entries(value as object);
      this.counted(0x80, 15, [0xde, 0xdf], entries.length);
      for (const [key, item] of entries) {
        checkKey(key, place);
        this.write(key, `a key of ${place}`, depth + 1);
        this.write(item as Value, `${place}.${String(key)}`, depth + 1);
      }
    }
  }

  private list(items: Value[], mark: string, place: string, depth: number): void {
    this.counted(0x90, 15, [0xdc, 0xdd], items.length + (mark ? 1 : 0));
    if (mark) {
      this.numItems += 1;
      this.raw(Buffer.from([0xd4, 3, mark.charCodeAt(0)]));
    }
    for (let index = 0; index < items.length; index++) this.write(items[index], `${place}[${index}]`, depth + 1);
  }

  private number(value: number, place: string): void {
    if (Number.isNaN(value)) throw untransportable("a number", "NaN", place);
    if (Number.isSafeInteger(value) && !Object.is(value, -0)) {
      this.integer(BigInt(value), place);
      return;
    }
    this.byte(0xcb);
    this.size = this.room(8).writeDoubleBE(value, this.size);
  }

  private integer(value: bigint, place: string): void {
    if (value < -(2n ** 63n) || value >= 2n ** 64n)
      throw untransportable("an integer of at most 64 bits", `${value}`.slice(0, 30), place);
    if (value >= 0n) {
      if (value < 0x80n) this.byte(Number(value));
      else if (value < 0x100n) this.bytesOf(0xcc, 1, value);
      else if (value < 0x10000n) this.bytesOf(0xcd, 2, value);
      else if (value < 0x100000000n) this.bytesOf(0xce, 4, value);
      else this.bytesOf(0xcf, 8, value);
    } else if (value >= -0x20n) this.byte(Number(value + 0x100n));
    else if (value >= -0x80n) this.bytesOf(0xd0, 1, value);
    else if (value >= -0x8000n) this.bytesOf(0xd1, 2, value);
    else if (value >= -0x80000000n) this.bytesOf(0xd2, 4, value);
    else this.bytesOf(0xd3, 8, value);
  }

  private text(value: string, place: string): void {
    const encoded = Buffer.from(value, "utf8");
    if (encoded.includes("\ufffd") && !isWellFormed(value))
      throw untransportable("text that UTF-8 can encode", "a lone surrogate", place);
    if (encoded.length < 32) this.byte(0xa0 + encoded.length);
    else this.sized([0xd9, 0xda, 0xdb], encoded.length);
    this.raw(encoded);
  }

  private array(value: NDArray): void {
    const shape = value.shape as number[] | null;
    if (value.data.byteLength > INLINE_BYTES) {
      this.ext(1, [pack([this.frames.length, value.dtype, shape])]);
      this.frames.push(new Uint8Array(value.data)); // the environment may write into the same memory next
    } else {
      this.ext(2, [pack([value.dtype, shape]), value.data]);
    }
  }

  private ext(code: number, parts: Uint8Array[]): void {
    const size = parts.reduce((sum, part) => sum + part.byteLength, 0);
    const fixed = [1, 2, 4, 8, 16].indexOf(size);
    if (fixed >= 0) this.byte(0xd4 + fixed);
    else this.sized([0xc7, 0xc8, 0xc9], size);
    this.byte(code);
    parts.forEach((part) => this.raw(part));
  }

  private counted(short: number, most: number, long: [number, number], count: number): void {
    if (count <= most) this.byte(short + count);
    else if (count < 0x10000) this.bytesOf(long[0], 2, BigInt(count));
    else this.bytesOf(long[1], 4, BigInt(count));
  }

  private sized(codes: [number, number, number], size: number): void {
    if (size < 0x100) this.bytesOf(codes[0], 1, BigInt(size));
    else if (size < 0x10000) this.bytesOf(codes[1], 2, BigInt(size));
    else this.bytesOf(codes[2], 4, BigInt(size));
  }

  private bytesOf(code: number, width: 1 | 2 | 4 | 8, value: bigint): void {
    this.byte(code);
    const buffer = this.room(width);
    if (width === 8) this.size = buffer.writeBigUInt64BE(BigInt.asUintN(64, value), this.size);
    else this.size = buffer.writeUIntBE(Number(BigInt.asUintN(8 * width, value)), this.size, width);
  }

  private byte(value: number): void {
    this.size = this.room(1).writeUInt8(value, this.size);
  }

  private raw(bytes: Uint8Array): void {
    this.room(bytes.byteLength).set(bytes, this.size);
    this.size += bytes.byteLength;
  }

  private room(size: number): Buffer {
    if (this.size + size > this.buffer.length) {
      const larger = Buffer.allocUnsafe(Math.max(2 * this.buffer.length, this.size + size));
      this.buffer.copy(larger, 0, 0, this.size);
      this.buffer = larger;
    }
    return this.buffer;
  }
}

function untransportable(expected: string, got: string, place: string): LongstepError {
  return new LongstepError("UnsupportedTypeError", `expected ${expected}, got ${got} at ${place.slice(0, 300)}`);
}

function isWellFormed(text: string): boolean {
  return Buffer.from(text, "utf8").toString("utf8") === text;
}

function isScalar(key: unknown): boolean {
  if (key instanceof NDArray) return key.shape === null && !key.dtype.startsWith("<c");
  return key === null || ["boolean", "number", "bigint", "string"].includes(typeof key) || key instanceof Uint8Array;
}

function checkKey(key: unknown, place: string): void {
  if (!isScalar(key)) throw untransportable("a key that is a scalar", typeof key, place);
}

/** The order in which a set's members travel: by the name of their Python type, then by value. */
function compareMembers(a: Value, b: Value): number {
  const [left, right] = [typeName(a), typeName(b)];
  if (left !== right) return left < right ? -1 : 1;
  if (typeof a === "string" || a instanceof Uint8Array)
    return Buffer.compare(Buffer.from(a as string), Buffer.from(b as string));
  return Number((a as number) > (b as number)) - Number((a as number) < (b as number));
}

function typeName(value: Value): string {
  if (value === null) return "NoneType";
  if (typeof value === "boolean") return "bool";
  if (typeof value === "string") return "str";
  if (typeof value === "bigint") return "int";
  if (typeof value === "number") return Number.isSafeInteger(value) ? "int" : "float";
  return value instanceof NDArray ? value.dtype : "bytes";
}

// ---- reading --------------------------------------------------------------------------------------------------------

class Mark {
  constructor(readonly kind: string) {}
}

class Reader {
  private readonly view: DataView;
  private position = 0;
  private numItems = 0;
  private readonly unread: Set<number>;

  constructor(
    private readonly body: Uint8Array,
    private readonly raw: readonly Uint8Array[],
    private readonly limits: Limits,
  ) {
    this.view = new DataView(body.buffer, body.byteOffset, body.byteLength);
    this.unread = new Set(raw.keys());
  }

  finish(): void {
    if (this.position !== this.body.byteLength) throw new ProtocolError("expected one msgpack value, got bytes after it");
    if (this.unread.size > 0) throw new ProtocolError("expected every raw frame to be used");
  }

  read(depth: number): Value {
    const value = this.any(depth);
    if (value instanceof Mark) throw new ProtocolError("expected a mark only as the first element of an array");
    return value;
  }

  private any(depth: number): Value | Mark {
    if (++this.numItems > this.limits.max_items) throw new ProtocolError(`expected at most ${this.limits.max_items} values`);
    const first = this.unsigned(1);
    if (first < 0x80) return first;
    if (first < 0x90) return this.map(first & 0x0f, depth);
    if (first < 0xa0) return this.list(first & 0x0f, depth);
    if (first < 0xc0) return this.text(first & 0x1f);
    if (first >= 0xe0) return first - 0x100;
    switch (first) {
      case 0xc0:
        return null;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xc4:
      case 0xc5:
      case 0xc6:
        return new Uint8Array(this.bytes(this.unsigned(1 << (first - 0xc4))));
      case 0xc7:
      case 0xc8:
      case 0xc9:
        return this.ext(this.unsigned(1 << (first - 0xc7)));
      case 0xca:
        return this.view.getFloat32(this.advance(4));
      case 0xcb:
        return this.view.getFloat64(this.advance(8));
      case 0xcc:
      case 0xcd:
      case 0xce:
        return this.unsigned(1 << (first - 0xcc));
      case 0xcf:
        return narrowed(this.view.getBigUint64(this.advance(8)));
      case 0xd0:
        return this.view.getInt8(this.advance(1));
      case 0xd1:
        return this.view.getInt16(this.advance(2));
      case 0xd2:
        return this.view.getInt32(this.advance(4));
      case 0xd3:
        return narrowed(this.view.getBigInt64(this.advance(8)));
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        return this.ext(1 << (first - 0xd4));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return this.text(this.unsigned(1 << (first - 0xd9)));
      case 0xdc:
      case 0xdd:
        return this.list(this.unsigned(2 << (first - 0xdc)), depth);
      case 0xde:
      case 0xdf:
        return this.map(this.unsigned(2 << (first - 0xde)), depth);
    }
    throw new ProtocolError("expected msgpack, got the unused byte 0xc1");
  }

  private advance(size: number): number {
    const position = this.position;
    if (position + size > this.body.byteLength)
      throw new ProtocolError("expected a whole msgpack value, got a truncated one");
    this.position += size;
    return position;
  }

  private unsigned(width: number): number {
    const position = this.advance(width);
    if (width === 1) return this.view.getUint8(position);
    return width === 2 ? this.view.getUint16(position) : this.view.getUint32(position);
  }

  private bytes(size: number): Uint8Array {
    const position = this.advance(size);
    return this.body.subarray(position, position + size);
  }

  private text(size: number): string {
    const bytes = this.bytes(size);
    try {
      return UTF8.decode(bytes);
    } catch {
      throw new ProtocolError("expected text in UTF-8");
    }
  }

  private enter(count: number, depth: number): void {
    if (depth === this.limits.max_depth) throw new ProtocolError(`expected at most ${depth} nested containers`);
    // each member takes a byte at least, so what is claimed and not there is found before anything is built
    if (count > this.body.byteLength - this.position)
      throw new ProtocolError("expected a whole msgpack value, got a truncated one");
  }

  private list(count: number, depth: number): Value {
    this.enter(count, depth);
    if (count === 0) return [];
    const first = this.any(depth + 1);
    const items: Value[] = first instanceof Mark ? [] : [first];
    for (let index = 1; index < count; index++) items.push(this.read(depth + 1));
    if (!(first instanceof Mark)) return items;
    if (first.kind === "t") return Tuple.from(items) as Tuple;
    if (first.kind !== "s" && first.kind !== "f") throw new ProtocolError("expected mark t, s or f");
    if (!items.every(isScalar)) throw new ProtocolError("expected the members of a set to be scalars");
    if (new Set(items.map(identity)).size !== items.length) throw new ProtocolError("expected the members of a set to differ");
    return first.kind === "s" ? new Set(items) : new FrozenSet(items);
  }

  private map(count: number, depth: number): Value {
    this.enter(2 * count, depth);
    const entries = new Map<string, [Value, Value]>(); // of a repeated key the last one counts
    let isObject = true;
    for (let index = 0; index < count; index++) {
      const key = this.read(depth + 1);
      if (!isScalar(key)) throw new ProtocolError("expected the keys of a map to be scalars");
      isObject &&= typeof key === "string";
      const item = this.read(depth + 1);
      const name = identity(key);
      entries.set(name, [entries.get(name)?.[0] ?? key, item]);
    }
    // fromEntries defines properties and calls no setter, so a key such as __proto__ does no harm
    return isObject ? (Object.fromEntries(entries.values()) as Value) : new Map(entries.values());
  }

  private ext(size: number): Value | Mark {
    const code = this.view.getInt8(this.advance(1));
    const payload = this.bytes(size);
    if (code === 3) return new Mark(Buffer.from(payload).toString("latin1"));
    if (code !== 1 && code !== 2) throw new ProtocolError(`expected ext code 1, 2 or 3, got ${code}`);
    if (code === 1 && size > 256) throw new ProtocolError("expected an array header of at most 256 bytes");
    const header = new Reader(payload.subarray(0, 256), [], { ...this.limits, max_depth: 2, max_items: 32 });
    const parts = header.read(0);
    if (!Array.isArray(parts) || parts.length !== 4 - code) throw new ProtocolError("expected an array header");
    const [dtype, shape] = parts.slice(-2);
    let data = payload.subarray(header.position);
    if (code === 1) {
      const index = parts[0] as number;
      if (data.byteLength > 0 || !this.unread.delete(index))
        throw new ProtocolError("expected the index of an unused raw frame");
      data = this.raw[index] as Uint8Array;
    }
    if (typeof dtype !== "string" || !(Array.isArray(shape) || (shape === null && code === 2)))
      throw new ProtocolError("expected an array header");
    try {
      return new NDArray(dtype, shape as number[] | null, code === 1 ? data : new Uint8Array(data));
    } catch (error) {
      throw new ProtocolError((error as Error).message);
    }
  }
}

const UTF8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function narrowed(value: bigint): number | bigint {
  return value >= -(2n ** 53n) && value <= 2n ** 53n ? Number(value) : value;
}

/** Equal for keys that Python holds equal: True and 1 and 1.0. */
function identity(key: Value): string {
  if (key instanceof Uint8Array) return `b${Buffer.from(key).toString("latin1")}`;
  if (typeof key === "string") return `s${key}`;
  if (key instanceof NDArray) return `a${key.dtype}${Buffer.from(key.data).toString("latin1")}`;
  return key === null ? "null" : `n${typeof key === "bigint" ? key : Number(key)}`;
}
