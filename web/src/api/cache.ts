// The cache of the queries: when a request is repeated, and what shows that a session has ended.
import { MutationCache, QueryCache, QueryClient } from "@tanstack/react-query";
import { ApiError } from "./client";

const STALE_MS = 2_000;
const TRIES = 2;

export function createQueryClient(): QueryClient {
  // Any request may show that the session has ended; then the log-in comes.
  const check = (error: unknown) => {
    if (error instanceof ApiError && error.status === 401) {
      void client.invalidateQueries({ queryKey: ["session"] });
    }
  };
  const client: QueryClient = new QueryClient({
    queryCache: new QueryCache({
      onError: (error, { queryKey: [kind] }) => {
        if (kind !== "session") check(error);
      },
    }),
    mutationCache: new MutationCache({ onError: check }),
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
