"""What can be trained: one kind of drafter a file, all behind `kinds.base.Kind`."""
