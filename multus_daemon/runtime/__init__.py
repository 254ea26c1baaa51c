"""Foundations without a word of the domain: time, threads, files, queues, kernel facilities of the process."""
