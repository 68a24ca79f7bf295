/** CURVE keys: who may reach a server that other machines can reach. PROTOCOL.md, section 6. */

import { readFileSync, statSync } from "node:fs";
import type { Reply } from "zeromq";
import { LongstepError } from "./errors.js";

/** One party's keys, in Z85 text of 40 characters. */
export interface KeyPair {
  publicKey: string;
  secretKey: string;
}

/** What a server needs: its own pair, and the public keys of the clients it lets in. */
export interface ServerKeys extends KeyPair {
  allowed: string[];
}

/** What a client needs: its own pair, and its server's public key. */
export interface ClientKeys extends KeyPair {
  serverKey: string;
}

export const ZAP_ADDRESS = "inproc://zeromq.zap.01";
export const ZAP_DOMAIN = "longstep";

/** The pair in a `name.key_secret` file of `longstep keys new`, which only its owner may be able to read. */
export function loadKeyPair(path: string): KeyPair {
  const text = read(path);
  const secretKey = find(text, "secret");
  if (secretKey === null) throw new LongstepError("ConfigError", `expected a secret key in ${path}, got a public one`);
  if (process.platform !== "win32" && (statSync(path).mode & 0o077) !== 0)
    throw new LongstepError("ConfigError", `expected a secret key only you can read; run: chmod 600 ${path}`);
  return { publicKey: publicOf(text, path), secretKey };
}

/** The public key in a `name.key` file. */
export function loadPublicKey(path: string): string {
  return publicOf(read(path), path);
}

function read(path: string): string {
  try {
    return readFileSync(path, "utf8");
  } catch (error) {
    throw new LongstepError("ConfigError", `expected a key file at ${path}: ${(error as Error).message}`);
  }
}

function find(text: string, name: string): string | null {
  return new RegExp(`^\\s*${name}-key\\s*=\\s*"(.{40})"\\s*$`, "m").exec(text)?.[1] ?? null;
}

function publicOf(text: string, path: string): string {
  const key = find(text, "public");
  if (key === null) throw new LongstepError("ConfigError", `expected a key file at ${path}, it holds no public key`);
  return key;
}

/** Answer what libzmq asks about each connection (ZAP, rfc.zeromq.org/spec/27), until the socket is closed. */
export async function letIn(socket: Reply, allowed: readonly string[]): Promise<void> {
  const known = new Set(allowed);
  for await (const [version, number, domain, , , mechanism, credentials] of socket) {
    const isCurve = String(domain) === ZAP_DOMAIN && String(mechanism) === "CURVE" && credentials?.byteLength === 32;
    const isKnown = isCurve && known.has(z85(credentials as Buffer));
    await socket.send([version as Buffer, number as Buffer, isKnown ? "200" : "400", isKnown ? "OK" : "", "", ""]);
  }
}

const DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

/** Four bytes in five characters (rfc.zeromq.org/spec/32). */
export function z85(data: Buffer): string {
  let text = "";
  for (let at = 0; at < data.byteLength; at += 4) {
    let value = data.readUInt32BE(at);
    let five = "";
    for (let digit = 0; digit < 5; digit++) {
      five = (DIGITS[value % 85] as string) + five;
      value = Math.floor(value / 85);
    }
    text += five;
  }
  return text;
}
