// Folds long chains of checkpoints in a lineage into one node each, so that ten thousand
// checkpoints become a few dozen nodes. A fold contains only equal checkpoints without events:
// pins, forks, exports, resumes, rollbacks and ends stay visible. Pure functions.
import type { Graph, GraphEdge, GraphNode } from "./api/types";
import { stageOfNode } from "./durability";

export interface Fold extends GraphNode {
  kind: "fold";
  members: string[];
  first_step: number;
  last_step: number;
}

export type Shown = GraphNode | Fold;
export const isFold = (node: Shown): node is Fold => node.kind === "fold";

/** An expanded fold shows about this many nodes, and the rest in smaller folds. */
export const SHOWN_MAX = 24;
const FOLD_MIN = 4;
const ID = /^(.*):step-\d+\.a(\d+)\.l(\d+)$/;
const ATTEMPT = /^(.*):attempt-(\d+)$/;

/** (run, attempt, launch) from the id of a checkpoint or, without a launch, of an attempt. */
function originOf(id: string): [string, number, number] | null {
  const found = ID.exec(id) ?? ATTEMPT.exec(id);
  return found ? [found[1] ?? "", Number(found[2]), Number(found[3] ?? 0)] : null;
}

/** Whether an attempt resumed from its own checkpoint. */
function isInPlace({ from, to, kind }: GraphEdge): boolean {
  if (kind !== "resumed_from") return false;
  const [one, other] = [originOf(from), originOf(to)];
  return one !== null && other !== null && one[0] === other[0] && one[1] === other[1];
}

/** The edges, in which a restart in place leads from the checkpoint to the first one of the new
    launch. An edge from the attempt, which wrote both, would close a cycle. */
function withoutCycles(edges: GraphEdge[]): GraphEdge[] {
  const restarted = new Set(edges.filter(isInPlace).map((edge) => edge.to));
  return edges.filter((edge) => !isInPlace(edge)).map((edge) => {
    if (edge.kind !== "parent" || !restarted.has(edge.to)) return edge;
    const [child, parent] = [originOf(edge.from), originOf(edge.to)];
    const isNext = child && parent && child[1] === parent[1] && child[2] > parent[2];
    return isNext ? { ...edge, kind: "resumed_from" } : edge;
  });
}

/** The edges with `from` before `to` in time, and edges from attempts to their first checkpoint. */
export function inTime({ nodes, edges }: Graph): GraphEdge[] {
  const found = withoutCycles(edges).map((edge) =>
    edge.kind === "exported_to" || edge.kind === "rolled_back"
      ? edge
      : { from: edge.to, to: edge.from, kind: edge.kind },
  );
  const attempts = new Map(
    nodes.filter((one) => one.kind === "attempt").map((one) => [`${one.run}/${one.number}`, one]),
  );
  const firsts = new Map<string, GraphNode>();
  for (const node of nodes) {
    const match = node.kind === "checkpoint" ? ID.exec(node.id) : null;
    if (!match) continue;
    const key = `${match[1]}/${Number(match[2])}`;
    const before = firsts.get(key);
    if (!before || (node.step ?? 0) < (before.step ?? 0)) firsts.set(key, node);
  }
  const reached = new Set(found.map((edge) => edge.to));
  for (const [key, attempt] of attempts) {
    const first = firsts.get(key);
    if (first) found.push({ from: attempt.id, to: first.id, kind: "made" });
    const run = nodes.find((one) => one.kind === "run" && one.run === attempt.run);
    if (run && !reached.has(attempt.id)) found.push({ from: run.id, to: attempt.id, kind: "made" });
  }
  return found;
}

interface Chain {
  before: string | null;
  members: GraphNode[];
}

const look = (node: GraphNode): string =>
  [stageOfNode(node), node.mirrored ?? false, node.rolled_back, node.run].join("|");

/** The longest chains of checkpoints that are connected with their neighbours only. */
export function chains(nodes: GraphNode[], edges: GraphEdge[]): Chain[] {
  const next = new Map<string, string[]>();
  const previous = new Map<string, string[]>();
  const busy = new Set<string>();
  const put = (map: Map<string, string[]>, key: string, value: string) =>
    map.set(key, [...(map.get(key) ?? []), value]);
  for (const edge of edges) {
    if (edge.kind !== "parent") {
      busy.add(edge.from).add(edge.to);
      continue;
    }
    put(next, edge.from, edge.to);
    put(previous, edge.to, edge.from);
  }
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const isDull = (node: GraphNode): boolean =>
    node.kind === "checkpoint" && !node.pinned && !busy.has(node.id) &&
    next.get(node.id)?.length === 1 && previous.get(node.id)?.length === 1;
  const found: Chain[] = [];
  const taken = new Set<string>();
  for (const node of nodes) {
    if (taken.has(node.id) || !isDull(node)) continue;
    let start = node;
    for (;;) {
      const before = byId.get(previous.get(start.id)?.[0] ?? "");
      if (!before || !isDull(before) || look(before) !== look(node) || before === node) break;
      start = before;
    }
    const members: GraphNode[] = [];
    let at: GraphNode | undefined = start;
    while (at && isDull(at) && look(at) === look(node) && !taken.has(at.id)) {
      taken.add(at.id);
      members.push(at);
      at = byId.get(next.get(at.id)?.[0] ?? "");
    }
    found.push({ before: previous.get(start.id)?.[0] ?? null, members });
  }
  return found;
}

function foldOf(members: GraphNode[]): Fold {
  const [first, last] = [members[0], members.at(-1)];
  return {
    id: `fold:${first?.id}…${last?.id}`,
    kind: "fold",
    run: first?.run,
    state: first?.state,
    verified: first?.verified,
    mirrored: first?.mirrored,
    rolled_back: first?.rolled_back,
    members: members.map((one) => one.id),
    first_step: first?.step ?? 0,
    last_step: last?.step ?? 0,
  };
}

/** A chain as one fold or, if it is expanded, as its nodes or smaller folds. */
function unfold(members: GraphNode[], open: ReadonlySet<string>): Shown[] {
  if (members.length < FOLD_MIN) return members;
  const fold = foldOf(members);
  if (!open.has(fold.id)) return [fold];
  if (members.length <= SHOWN_MAX) return members;
  const size = Math.max(FOLD_MIN, Math.ceil(members.length / SHOWN_MAX));
  const parts: Shown[] = [];
  for (let from = 0; from < members.length; from += size) {
    parts.push(...unfold(members.slice(from, from + size), open));
  }
  return parts;
}

export interface Folded {
  nodes: Shown[];
  edges: GraphEdge[];
}

/** The graph with its chains folded, except for those in `open`. */
export function fold(graph: Graph, open: ReadonlySet<string>): Folded {
  const edges = inTime(graph);
  const place = new Map<string, string>();
  const folds: Fold[] = [];
  for (const { members } of chains(graph.nodes, edges)) {
    for (const shown of unfold(members, open)) {
      if (!isFold(shown)) continue;
      folds.push(shown);
      for (const member of shown.members) place.set(member, shown.id);
    }
  }
  const nodes: Shown[] = [...graph.nodes.filter((node) => !place.has(node.id)), ...folds];
  const seen = new Set<string>();
  const kept: GraphEdge[] = [];
  for (const edge of edges) {
    const [from, to] = [place.get(edge.from) ?? edge.from, place.get(edge.to) ?? edge.to];
    const key = `${from}|${to}|${edge.kind}`;
    if (from === to || seen.has(key)) continue;
    seen.add(key);
    kept.push({ from, to, kind: edge.kind });
  }
  return { nodes, edges: kept };
}
