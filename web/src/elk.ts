// The worker that lays out graphs. It begins before the modules that use it are loaded.
import workerUrl from "elkjs/lib/elk-worker.min.js?url";

export interface LayoutWorker {
  worker: Worker;
  /** Rejects if the worker cannot be loaded. */
  failed: Promise<never>;
}

let started: LayoutWorker | null = null;

/** The worker, which loads and compiles for longer than it lays out a graph. */
export function startWorker(): LayoutWorker {
  if (started) return started;
  const worker = new Worker(workerUrl);
  const failed = new Promise<never>((_, reject) => {
    worker.onerror = () => {
      started = null;
      reject(new Error("The layout of graphs could not be loaded from the server."));
    };
  });
  // The caller that waits for a layout handles it. Before that, it is not an error of the page.
  failed.catch(() => undefined);
  started = { worker, failed };
  return started;
}
