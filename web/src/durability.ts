// How safe a checkpoint is, from memory to a second place. Pure.
import type { Checkpoint, GraphNode } from "./api/types";

/** What an icon stands for: the last stage that was reached in the checkpoint's own place. */
export type Stage = "staged" | "durable" | "verified" | "damaged" | "deleted";

export const STAGE_WORDS: Record<Stage | "mirrored", string> = {
  staged: "staged: sealed in memory, being written",
  durable: "durable: committed by its manifest",
  verified: "verified: every byte was read back",
  damaged: "damaged",
  deleted: "deleted",
  mirrored: "mirrored: copied to a second place",
};

/** The stage of a state of the server's and of the last verdict, if there was one. */
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

/** The stages in their order, each with when it was reached, if it was. Without a mirror in the
    run's spec the last one is left out. */
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
