"""Groups of graded rollouts from the engine, and their packing into batches."""
