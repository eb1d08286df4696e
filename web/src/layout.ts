// The layout of a graph, computed by ELK in a worker that only the lineage view loads.
import ELK, { type ElkNode } from "elkjs/lib/elk-api.js";
import { startWorker, type LayoutWorker } from "./elk";
import type { Folded } from "./fold";

export const NODE_WIDTH = 168;
export const NODE_HEIGHT = 46;

export interface Point {
  x: number;
  y: number;
}

/** The position of each node, and the path of each edge by its number. */
export interface Layout {
  places: Map<string, Point>;
  ways: Map<number, Point[]>;
  /** Whether the graph goes down, in a narrow window, or in rows to the right. */
  isDown: boolean;
}

const OPTIONS = {
  "elk.algorithm": "layered",
  "elk.spacing.nodeNode": "18",
  "elk.spacing.componentComponent": "32",
  "elk.layered.nodePlacement.strategy": "NETWORK_SIMPLEX",
  "elk.layered.considerModelOrder.strategy": "NODES_AND_EDGES",
};
// With more nodes, the exact placement takes too long. A simpler one is still legible.
const EXACT_MAX = 150;

// A long chain continues in the next row, so that its cards stay readable.
const ROWS = {
  "elk.direction": "RIGHT",
  "elk.layered.spacing.nodeNodeBetweenLayers": "58",
  "elk.layered.wrapping.strategy": "MULTI_EDGE",
  "elk.layered.wrapping.additionalEdgeSpacing": "4",
};
const DOWN = { "elk.direction": "DOWN", "elk.layered.spacing.nodeNodeBetweenLayers": "34" };

let current: { by: LayoutWorker; elk: InstanceType<typeof ELK> } | null = null;

/** Lays out a graph. Rejects if the worker cannot be loaded; the next call begins a new one. */
function layoutOf(graph: ElkNode): Promise<ElkNode> {
  const by = startWorker();
  if (current?.by !== by) current = { by, elk: new ELK({ workerFactory: () => by.worker }) };
  return Promise.race([current.elk.layout(graph), by.failed]);
}

/** Lays out the graph in rows with the ratio `aspect`, or downwards if it is null.

    Rejects if the worker cannot be loaded. */
export async function layOut({ nodes, edges }: Folded, aspect: number | null): Promise<Layout> {
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
  const placed = await layoutOf(graph);
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
