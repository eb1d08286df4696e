// The tone and the shape of each state. The shape helps readers who cannot see the colour.

export type Tone = "live" | "good" | "warn" | "bad" | "idle" | "note";
export type Shape =
  | "dot" | "ring" | "check" | "cross" | "bars" | "down" | "diamond" | "slash" | "copies";

const LOOKS: Record<string, [Tone, Shape]> = {
  running: ["live", "dot"],
  training: ["live", "dot"],
  starting: ["live", "ring"],
  stopping: ["warn", "down"],
  pausing: ["note", "down"],
  cancelling: ["warn", "down"],
  relaunching: ["live", "ring"],
  stopped: ["idle", "slash"],
  relaunched: ["note", "ring"],
  created: ["idle", "ring"],
  submitted: ["idle", "ring"],
  pending: ["idle", "ring"],
  queued: ["idle", "ring"],
  waiting: ["idle", "ring"],
  paused: ["note", "bars"],
  completed: ["good", "check"],
  preempted: ["warn", "down"],
  timed_out: ["warn", "down"],
  failed: ["bad", "cross"],
  hung: ["bad", "diamond"],
  node_failed: ["bad", "cross"],
  lost: ["bad", "cross"],
  cancelled: ["idle", "slash"],
  staged: ["live", "ring"],
  committed: ["live", "dot"],
  durable: ["live", "dot"],
  verified: ["good", "check"],
  mirrored: ["good", "copies"],
  damaged: ["bad", "cross"],
  deleted: ["idle", "slash"],
  silent: ["bad", "diamond"],
  alive: ["live", "dot"],
  healthy: ["good", "check"],
  kept: ["good", "check"],
  "would be deleted": ["warn", "down"],
};

export function lookOf(state: string): [Tone, Shape] {
  return LOOKS[state] ?? ["idle", "ring"];
}

export const PARTS = [
  "training", "lost", "blocked", "flushing", "loading", "starting", "queued", "hung", "stopped",
] as const;
export type Part = (typeof PARTS)[number];

export const PART_WORDS: Record<Part, string> = {
  training: "productive",
  lost: "lost work",
  blocked: "blocked by checkpointing",
  flushing: "final save and exit",
  loading: "loading checkpoint",
  starting: "start-up",
  queued: "queued",
  hung: "hung",
  stopped: "idle",
};

const LIVE = new Set(["queued", "running", "waiting", "paused"]);

/** Whether a run in this state may still continue by itself or after `resume`. */
export const isLive = (state: string): boolean => LIVE.has(state);
/** A key with spaces instead of underscores. */
export const plain = (word: string): string => word.replaceAll("_", " ");
