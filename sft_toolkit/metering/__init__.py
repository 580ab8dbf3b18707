"""What a log entry says: tokens, accuracy, where the time goes, what the device could do."""
