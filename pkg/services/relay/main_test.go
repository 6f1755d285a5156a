package relay

import (
	"testing"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }
