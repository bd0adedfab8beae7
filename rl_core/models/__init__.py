"""Models: conversion, checkpoints, sparse upcycling, and the differentiable forward that the trainer uses."""
