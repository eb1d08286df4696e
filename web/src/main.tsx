// The entry point of the page.
import { QueryCache, QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { ApiError } from "./api/client";
import { preloadViews } from "./lazy";
import { ClockProvider } from "./parts/basics";
import { router } from "./router";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/parts.css";

const STALE_MS = 2_000;
const PRELOAD_MS = 2_000;
const TRIES = 2;

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

const place = document.getElementById("page");
if (place) {
  createRoot(place).render(
    <StrictMode>
      <QueryClientProvider client={client}>
        <ClockProvider>
          <RouterProvider router={router} />
        </ClockProvider>
      </QueryClientProvider>
    </StrictMode>,
  );
  // Load the other views after the first one.
  window.setTimeout(() => void preloadViews(), PRELOAD_MS);
}
