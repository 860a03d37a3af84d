// Transactions through the pool of database/sql, as in tests/support/clients/pools.py.

package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"
)

type poolLoad struct {
	pool      *sql.DB
	pause     time.Duration
	stopping  chan struct{} // closed when the workers have to stop
	committed []int64       // by worker
	mutex     sync.Mutex
	errors    map[string]int
}

// runPool works until the end of the standard input. It retries no transaction.
func runPool() error {
	config := mysql.NewConfig()
	config.Net, config.Addr, config.User = "tcp", os.Getenv("POOL_ADDRESS"), "root"
	config.DBName = os.Getenv("POOL_DATABASE")
	connector, err := mysql.NewConnector(config)
	if err != nil {
		return err
	}
	workers, err := strconv.Atoi(os.Getenv("POOL_WORKERS"))
	if err != nil {
		return err
	}
	pause, err := time.ParseDuration(os.Getenv("POOL_PAUSE_MS") + "ms")
	if err != nil {
		return err
	}
	load := poolLoad{
		pool: sql.OpenDB(connector), pause: pause, stopping: make(chan struct{}),
		committed: make([]int64, workers), errors: map[string]int{},
	}
	defer load.pool.Close()
	if os.Getenv("POOL_SETTINGS") == "recommended" {
		load.pool.SetMaxOpenConns(workers)
		load.pool.SetMaxIdleConns(workers) // the default is 2
		load.pool.SetConnMaxLifetime(10 * time.Minute)
	}
	var haveWorked, haveStopped sync.WaitGroup
	for worker := range workers {
		haveWorked.Add(1)
		haveStopped.Add(1)
		go func() {
			defer haveStopped.Done()
			load.work(worker, haveWorked.Done)
		}()
	}
	haveWorked.Wait()
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadByte()
	close(load.stopping)
	haveStopped.Wait()
	return json.NewEncoder(os.Stdout).Encode(map[string]any{"committed": load.committed, "errors": load.errors})
}

func (load *poolLoad) work(worker int, hasWorked func()) {
	for {
		select {
		case <-load.stopping:
			return
		case <-time.After(load.pause):
		}
		if err := load.transaction(worker); err != nil {
			load.mutex.Lock()
			load.errors[err.Error()]++
			load.mutex.Unlock()
		} else {
			load.committed[worker]++
			if load.committed[worker] == 1 {
				hasWorked()
			}
		}
	}
}

func (load *poolLoad) transaction(worker int) error {
	transaction, err := load.pool.BeginTx(context.Background(), nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer transaction.Rollback() // has no effect after a commit
	if _, err := transaction.Exec("update counters set count = count + 1 where worker = ?", worker); err != nil {
		return fmt.Errorf("update: %w", err)
	}
	var count int64
	if err := transaction.QueryRow("select count from counters where worker = ?", worker).Scan(&count); err != nil {
		return fmt.Errorf("select: %w", err)
	}
	if err := transaction.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}
