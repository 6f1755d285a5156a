module tunnel.example/tunnel/test/cluster/pki

go 1.24.0
