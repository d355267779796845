# gatewayd: everything that is done with the source. `make help` lists it.
SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION  := $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
GOBUILD  := go build -trimpath -ldflags '-s -w -X main.version=$(VERSION)'
BIN      := $(CURDIR)/.bin
BENCH    := internal/testnet/bench

FUZZTIME ?= 10s
ROUNDS   ?= 3
TESTS    ?= ping,tcp,tcp1500,udp,udptrain,crr,mem,memudp
PEERS    ?= kernel gatewayd pasta slirp4netns

# Packages with tests that need namespaces: those that build labs, or ask for -short.
NETNS = $(sort ./internal/testnet/ $(dir $(shell grep -rlE '"gatewayd/internal/testnet"|"gatewayd/internal/hostnet/hostnettest"|testing\.Short\(\)' --include='*_test.go' --exclude-dir=.git . || true)))

.PHONY: help build tools deps test check fmt vet staticcheck deadcode lint layers unit unit386 race netns fuzz bench bench-programs bench-net gate demo soak ci clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build .bin/gatewayd, stripped and stamped with its version
	CGO_ENABLED=0 $(GOBUILD) -o $(BIN)/gatewayd ./cmd/gatewayd

# The tools are pinned by tools/go.mod.
$(BIN)/.tools: tools/go.mod tools/go.sum
	@mkdir -p $(BIN)
	go build -C tools -o $(BIN)/ tool
	@touch $@

tools: $(BIN)/.tools ## build the pinned tools into .bin

deps:
	@tools/install-deps

test: unit netns ## unit tests, then the tests in network namespaces (needs root)

check: lint layers unit race ## format, vet, staticcheck, dead code, layers, unit tests, race detector; no root needed

lint: fmt vet staticcheck deadcode ## format, vet, staticcheck, dead code

fmt: tools
	@out=$$($(BIN)/gofumpt -l .); if [[ -n $$out ]]; then echo "not in gofumpt's format (.bin/gofumpt -w .):"; echo "$$out"; exit 1; fi
	@echo "ok  	format"

vet:
	go vet ./...

staticcheck: tools
	$(BIN)/staticcheck ./...

deadcode: tools
	@out=$$($(BIN)/deadcode -test ./...); if [[ -n $$out ]]; then echo "never called, not even by tests:"; echo "$$out"; exit 1; fi
	@echo "ok  	no dead code"

layers:
	go test -count=1 . # what go list finds is not part of the cache's key

unit: ## unit tests; -short leaves out what needs namespaces
	go test -short -timeout 10m ./...

unit386: ## unit tests as 32-bit programs
	GOARCH=386 CGO_ENABLED=0 go test -short -timeout 10m ./...

race: ## unit tests under the race detector
	go test -short -race -timeout 15m ./...

netns: deps ## tests in network namespaces: the real binary, real clients (needs root)
	go test -count=1 -p 1 -timeout 20m $(NETNS)

fuzz: ## every fuzz target for FUZZTIME
	@grep -rlE '^func Fuzz' --include='*_test.go' . | xargs -r -n1 dirname | sort -u | while read -r dir; do \
		for target in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]*' "$$dir"/*_test.go | cut -d' ' -f2); do \
			echo "$$dir $$target"; go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) "$$dir"; \
		done; done

bench: tools ## Go benchmarks, summed up by benchstat
	@mkdir -p $(BIN)
	go test -short -run '^$$' -bench . -benchmem -count 3 ./... | tee $(BIN)/bench.txt
	$(BIN)/benchstat $(BIN)/bench.txt

bench-programs:
	@mkdir -p $(BIN)/bench
	CGO_ENABLED=0 $(GOBUILD) -o $(BIN)/bench/gatewayd ./cmd/gatewayd
	cd $(BENCH)/nbench && GOWORK=off go build -mod=mod -o $(BIN)/bench/nbench .

bench-net: deps bench-programs ## gatewayd against kernel forwarding and others, ROUNDS rounds: figures, targets, verdicts (needs root)
	@rm -f $(BIN)/bench/result.jsonl
	HARNESS_RUN=$(BIN)/bench $(BENCH)/harness.py run $(PEERS:%=$(BENCH)/peers/%.json) --rounds $(ROUNDS) --tests $(TESTS) --out $(BIN)/bench/result.jsonl
	@echo; echo "median (lowest-highest) [ratio to kernel forwarding / to the best peer]"; echo
	@$(BENCH)/harness.py report --ratio --spread $(BIN)/bench/result.jsonl
	@$(BENCH)/targets.py table $(BIN)/bench/result.jsonl

gate: deps bench-programs ## a short measurement that fails where a figure is far from its target (needs root)
	@rm -f $(BIN)/bench/gate.jsonl
	@HARNESS_RUN=$(BIN)/bench HARNESS_PREFIX=gate $(BENCH)/harness.py run $(BENCH)/peers/kernel.json $(BENCH)/peers/gatewayd.json \
		--rounds 1 --secs 1 --tests tcp,tcp1500,udp,crr --out $(BIN)/bench/gate.jsonl
	@$(BENCH)/targets.py gate $(BIN)/bench/gate.jsonl

demo: deps ## a client, a gateway and a server: flows, traffic and a kill, in half a minute (needs root)
	@go run ./internal/testnet/demo

soak: deps ## the long tests: files with the build tag soak, tests named TestSoak (needs root)
	go test -tags soak -run Soak -count=1 -p 1 -timeout 6h -v ./...

ci: check unit386 test gate ## what continuous integration runs

clean: ## remove what was built
	rm -rf $(BIN)
