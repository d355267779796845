package tun

import (
	"testing"

	"gatewayd/internal/hostnet/hostnettest"
)

func TestMain(m *testing.M) { hostnettest.Main(m) }
