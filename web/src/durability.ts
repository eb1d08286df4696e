// The durability of a checkpoint, from memory to a mirror. Pure functions.
import type { Checkpoint, GraphNode } from "./api/types";

/** The last stage that the checkpoint itself has reached, which its icon shows. */
export type Stage = "staged" | "durable" | "verified" | "damaged" | "deleted";

export const STAGE_WORDS: Record<Stage | "mirrored", string> = {
  staged: "staged: complete in memory, being written",
  durable: "durable: committed by its manifest",
  verified: "verified: every byte was read and compared",
  damaged: "damaged",
  deleted: "deleted",
  mirrored: "mirrored: copied to the mirror",
};

/** The stage from the server's state and the last verification, if there was one. */
export function stageOf(state: string | undefined, verdict: boolean | null | undefined): Stage {
  if (state === "staged" || state === "deleted" || state === "damaged") return state;
  if (verdict === false) return "damaged";
  return verdict ? "verified" : "durable";
}

export const stageOfNode = (node: GraphNode): Stage => stageOf(node.state, node.verified);

export const stageOfCheckpoint = (one: Checkpoint): Stage => stageOf(one.state, one.verified_ok);

export interface Reached {
  word: "staged" | "durable" | "verified" | "mirrored" | "damaged";
  at: string | null;
  note: string | null;
}

/** The stages in order, each with the time when it was reached. Without a mirror in the run's
    spec, the last one is omitted. */
export function reachedStages(one: Checkpoint, hasMirror: boolean): Reached[] {
  const isDamaged = stageOfCheckpoint(one) === "damaged";
  const whom = one.verified_by === "resume" ? "a resume" : one.verified_by;
  return [
    { word: "staged", at: one.staged_at, note: null },
    { word: "durable", at: one.committed_at, note: null },
    { word: isDamaged ? "damaged" : "verified", at: one.verified_at ?? null,
      note: whom ? `by ${whom}` : null },
    ...(hasMirror || one.mirrored_at
      ? [{ word: "mirrored", at: one.mirrored_at ?? null, note: null } as const] : []),
  ];
}
