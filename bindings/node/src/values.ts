/** Values that JavaScript has no literal for. */

const DTYPE = /^(\|b1|\|i1|\|u1|<[iu][248]|<f[248]|<c8|<c16)$/;

/** An array of numbers or booleans, or with `shape` null a numeric scalar of a fixed width. Bytes are little-endian, in C order. */
export class NDArray {
  /**
   * @param dtype One of `|b1 |i1 |u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8 <c8 <c16`.
   * @param shape Sizes, at most 16; null for a scalar.
   * @param data As many bytes as shape and dtype say.
   */
  constructor(
    readonly dtype: string,
    readonly shape: readonly number[] | null,
    readonly data: Uint8Array,
  ) {
    if (!DTYPE.test(dtype)) throw new TypeError(`expected a dtype such as <f4, got ${dtype}`);
    const sizes = shape ?? [];
    if (sizes.length > 16 || sizes.some((size) => !(Number.isInteger(size) && size >= 0 && size < 2 ** 40)))
      throw new TypeError("expected at most 16 sizes from 0 to 2**40");
    const expected = sizes.reduce((product, size) => product * BigInt(size), BigInt(dtype.slice(2)));
    if (expected !== BigInt(data.byteLength))
      throw new TypeError(`expected ${expected} bytes for an array, got ${data.byteLength}`);
  }

  /** An array over the numbers of a typed array, whose bytes are not copied. */
  static from(numbers: TypedArray, shape: readonly number[] = [numbers.length]): NDArray {
    const dtype = DTYPES[numbers.constructor.name];
    if (dtype === undefined) throw new TypeError(`expected a typed array, got ${numbers.constructor.name}`);
    return new NDArray(dtype, shape, new Uint8Array(numbers.buffer, numbers.byteOffset, numbers.byteLength));
  }

  /** The numbers, in C order, in a typed array of their own; not for halves and complex numbers. */
  toTypedArray(): TypedArray {
    const copy = new Uint8Array(this.data).buffer; // a Buffer's `slice` copies nothing
    switch (this.dtype) {
      case "|b1":
      case "|u1":
        return new Uint8Array(copy);
      case "|i1":
        return new Int8Array(copy);
      case "<i2":
        return new Int16Array(copy);
      case "<u2":
        return new Uint16Array(copy);
      case "<i4":
        return new Int32Array(copy);
      case "<u4":
        return new Uint32Array(copy);
      case "<i8":
        return new BigInt64Array(copy);
      case "<u8":
        return new BigUint64Array(copy);
      case "<f4":
        return new Float32Array(copy);
      case "<f8":
        return new Float64Array(copy);
    }
    throw new TypeError(`expected a dtype that JavaScript has, got ${this.dtype}`);
  }
}

export type TypedArray =
  | Uint8Array
  | Int8Array
  | Int16Array
  | Uint16Array
  | Int32Array
  | Uint32Array
  | BigInt64Array
  | BigUint64Array
  | Float32Array
  | Float64Array;

const DTYPES: Readonly<Record<string, string>> = {
  Uint8Array: "|u1",
  Buffer: "|u1",
  Int8Array: "|i1",
  Int16Array: "<i2",
  Uint16Array: "<u2",
  Int32Array: "<i4",
  Uint32Array: "<u4",
  BigInt64Array: "<i8",
  BigUint64Array: "<u8",
  Float32Array: "<f4",
  Float64Array: "<f8",
};

/** Python's tuple; an array in every other respect. */
export class Tuple extends Array<Value> {}

/** Python's frozenset; a Set in every other respect. */
export class FrozenSet extends Set<Value> {}

/**
 * What can travel. A number that is an integer travels as an integer, also if Python sent 1.0; an integer beyond 2^53 is a
 * bigint. A map whose keys are all text is an object, another one a Map. Bytes are a Uint8Array.
 */
export type Value =
  | null
  | boolean
  | number
  | bigint
  | string
  | Uint8Array
  | NDArray
  | Value[]
  | Set<Value>
  | Map<Value, Value>
  | { [key: string]: Value };
