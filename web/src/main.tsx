// The entry point of the page.
import { QueryClientProvider } from "@tanstack/react-query";
import { RouterProvider } from "@tanstack/react-router";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { preloadViews } from "./lazy";
import { ClockProvider } from "./parts/basics";
import { router } from "./router";
import "./styles/base.css";
import "./styles/shell.css";
import "./styles/parts.css";
import "./styles/tags.css";

const PRELOAD_MS = 2_000;

const place = document.getElementById("page");
if (place) {
  createRoot(place).render(
    <StrictMode>
      <QueryClientProvider client={router.options.context.client}>
        <ClockProvider>
          <RouterProvider router={router} />
        </ClockProvider>
      </QueryClientProvider>
    </StrictMode>,
  );
  // Load the other views after the first one.
  window.setTimeout(() => void preloadViews(), PRELOAD_MS);
}
