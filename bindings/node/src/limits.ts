/** How much a peer may send; PROTOCOL.md, section 1. */
export interface Limits {
  max_head_bytes: number;
  max_body_bytes: number;
  max_frame_bytes: number;
  max_frames: number;
  max_message_bytes: number;
  max_depth: number;
  max_items: number;
}

const MIB = 1 << 20;

/** What is taken in. */
export const LIMITS: Readonly<Limits> = {
  max_head_bytes: 64 * 1024,
  max_body_bytes: 16 * MIB,
  max_frame_bytes: 64 * MIB,
  max_frames: 1024,
  max_message_bytes: 256 * MIB,
  max_depth: 32,
  max_items: MIB,
};

/** What the client of an environment service takes in: the results of many slots come in one message. */
export const REPLY_LIMITS: Readonly<Limits> = {
  ...LIMITS,
  max_body_bytes: 256 * MIB,
  max_frame_bytes: 256 * MIB,
  max_frames: 16384,
  max_message_bytes: 1024 * MIB,
  max_items: 256 * MIB,
};
