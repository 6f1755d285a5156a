module tunnel/test/cluster/pki

go 1.24.0
