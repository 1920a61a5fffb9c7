"""batchbound"""
