"""Foundations that know nothing of networks or CNI: time, threads, files, queues, kernel facilities of the process."""
