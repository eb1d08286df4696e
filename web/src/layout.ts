// Where the nodes of a graph stand, found by ELK in a worker that only Lineage loads.
import ELK, { type ElkNode } from "elkjs/lib/elk-api.js";
import workerUrl from "elkjs/lib/elk-worker.min.js?url";
import type { Folded } from "./fold";

export const NODE_WIDTH = 168;
export const NODE_HEIGHT = 46;

export interface Point {
  x: number;
  y: number;
}

/** Where each node stands, and by its number the way of each edge. */
export interface Layout {
  places: Map<string, Point>;
  ways: Map<number, Point[]>;
  /** On a narrow window the line goes down, else to the right and on in the next row. */
  isDown: boolean;
}

const OPTIONS = {
  "elk.algorithm": "layered",
  "elk.spacing.nodeNode": "18",
  "elk.spacing.componentComponent": "32",
  "elk.layered.nodePlacement.strategy": "NETWORK_SIMPLEX",
  "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
};
// Beyond this many nodes the exact placement takes too long; a simpler one is still legible.
const EXACT_MAX = 150;

// A long line goes on in the next row, as text does, so that its cards can be read.
const ROWS = {
  "elk.direction": "RIGHT",
  "elk.layered.spacing.nodeNodeBetweenLayers": "58",
  "elk.layered.wrapping.strategy": "MULTI_EDGE",
  "elk.layered.wrapping.additionalEdgeSpacing": "4",
};
const DOWN = { "elk.direction": "DOWN", "elk.layered.spacing.nodeNodeBetweenLayers": "34" };

let elk: InstanceType<typeof ELK> | null = null;

/** Places for all nodes: in rows, `aspect` times as wide as high, or down without an aspect.

    Rejects when the worker cannot be loaded. */
export async function layOut({ nodes, edges }: Folded, aspect: number | null): Promise<Layout> {
  elk ??= new ELK({ workerUrl });
  const there = new Set(nodes.map((node) => node.id));
  const strategy = nodes.length > EXACT_MAX
    ? { "elk.layered.nodePlacement.strategy": "BRANDES_KOEPF" } : {};
  const shape = aspect === null ? DOWN : { ...ROWS, "elk.aspectRatio": aspect.toFixed(2) };
  const graph: ElkNode = {
    id: "root",
    layoutOptions: { ...OPTIONS, ...strategy, ...shape },
    children: nodes.map((node) => ({ id: node.id, width: NODE_WIDTH, height: NODE_HEIGHT })),
    edges: edges.flatMap(({ from, to }, index) =>
      there.has(from) && there.has(to) ? [{ id: `${index}`, sources: [from], targets: [to] }] : []),
  };
  const placed = await elk.layout(graph);
  return {
    places: new Map((placed.children ?? []).map(({ id, x = 0, y = 0 }) => [id, { x, y }])),
    ways: new Map((placed.edges ?? []).flatMap(({ id, sections }) => {
      const way = sections?.[0];
      const points = way && [way.startPoint, ...(way.bendPoints ?? []), way.endPoint];
      return points ? [[Number(id), points] as const] : [];
    })),
    isDown: aspect === null,
  };
}
