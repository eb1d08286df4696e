// The cache of the queries: when a request is repeated, and what shows that a session has ended.
import { QueryCache, QueryClient } from "@tanstack/react-query";
import { ApiError } from "./client";

const STALE_MS = 2_000;
const TRIES = 2;

export function createQueryClient(): QueryClient {
  const client: QueryClient = new QueryClient({
    // Any request may show that the session has ended; then the log-in comes.
    queryCache: new QueryCache({
      onError: (error, { queryKey: [kind] }) => {
        if (error instanceof ApiError && error.status === 401 && kind !== "session") {
          void client.invalidateQueries({ queryKey: ["session"] });
        }
      },
    }),
    defaultOptions: {
      queries: {
        staleTime: STALE_MS,
        // Retry only if the server did not respond.
        retry: (tries, error) => !(error instanceof ApiError) && tries < TRIES,
        refetchOnWindowFocus: true,
        // A server on loopback responds even without a network.
        networkMode: "always",
      },
      mutations: { networkMode: "always" },
    },
  });
  return client;
}
