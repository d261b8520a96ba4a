"""The Ray cluster that `baton up` owns on one machine."""
